"""rollout_correction: against its formulas in plain Python, any split, hostile input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import REJECTION_CRITERIA, rollout_correction, rollout_metrics
from tests.kernels.batches import batch, sequences, split

BOUNDS = {"k1": (0.7, 1.5), "k2": 0.05, "k3": 0.05}


def run(inputs, **options):
    return rollout_correction(
        inputs["old_log_probs"],
        inputs["ref_log_probs"],
        cu_seqlens=inputs["cu_seqlens"],
        response_mask=inputs["response_mask"],
        **options,
    )


def divergence(kind, x):
    return {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind]


def accepted(criterion, threshold, xs):
    """Whether each token of a sequence is accepted."""
    level, _, kind = criterion.rpartition("_")
    values = [divergence(kind, x) for x in xs]
    if level != "token" and values:
        one = {
            "seq_sum": sum(values),
            "seq_mean": sum(values) / len(values),
            "seq_max": max(values),
        }
        values = [one[level]] * len(values)
    if kind == "k1":
        return [threshold[0] <= math.exp(v) <= threshold[1] for v in values]
    return [v <= threshold for v in values]


def long_response(shift):
    """Log-probs of 10^5 tokens, and the log-ratios of their float32 values."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.rand(10**5, generator=generator)  # noqa: E731
    old = -3 * draw()
    rollout = old - 1e-3 * (draw() - 0.5) - shift
    return old, rollout, (old.double() - rollout.double()).tolist()


@pytest.mark.parametrize("shift", (-0.5, 0.0, 0.5))
def test_product_of_100_000_ratios(shift):
    """No overflow, no 0: beyond e^20 and e^-20 the exponent is clamped, before truncation."""
    old, rollout, log_ratios = long_response(shift)
    expected = math.exp(min(max(math.fsum(log_ratios), -20.0), 20.0))
    for threshold in (None, 2.0):
        weights = rollout_correction(
            old,
            rollout,
            cu_seqlens=torch.tensor([0, 10**5]),
            rollout_is="sequence",
            rollout_is_threshold=threshold,
        ).weights
        bounded = torch.tensor(expected if threshold is None else min(expected, threshold))
        torch.testing.assert_close(weights, bounded.expand(10**5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shift", (-0.05, 0.0, 0.05))
def test_geometric_mean_of_100_000_ratios(shift):
    """Bounds of seq_mean_k1 around it, one part in 10^6 apart."""
    old, rollout, log_ratios = long_response(shift)
    mean = math.exp(-math.fsum(log_ratios) / len(log_ratios))
    low, high = mean * (1 - 1e-6), mean * (1 + 1e-6)
    for bounds, kept in (((low, high), True), ((high, 2.0), False), ((0.5, low), False)):
        ends, rejection = torch.tensor([0, 10**5]), {"seq_mean_k1": bounds}
        correction = rollout_correction(old, rollout, cu_seqlens=ends, rejection=rejection)
        assert correction.response_mask.unique().tolist() == [kept]


@pytest.mark.parametrize("shift", (-25.0, -0.5, 0.0, 0.5, 25.0))
def test_geometric_mean_of_100_000_ratios_as_a_weight(shift):
    """In float32 to a rounding of the exponent: of e^25 too, clamped to e^20, and of half of it."""
    old, rollout, log_ratios = long_response(shift)
    half = torch.arange(10**5) % 2 == 0
    for mask in (None, half):
        taken = log_ratios if mask is None else log_ratios[::2]
        expected = math.exp(min(max(math.fsum(taken) / len(taken), -20.0), 20.0))
        weights = rollout_correction(
            old,
            rollout,
            cu_seqlens=torch.tensor([0, 10**5]),
            response_mask=mask,
            rollout_is="sequence_mean",
            rollout_is_threshold=None,
        ).weights
        weights = weights if mask is None else weights[mask]
        torch.testing.assert_close(weights, torch.full_like(weights, expected), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_infinities_of_both_signs_leave_the_others_as_they_are(dtype):
    """A sequence with as many tokens that only one of the policies can produce as of the other."""
    generator = torch.Generator().manual_seed(0)
    old, rollout = (torch.randn(400, generator=generator, dtype=dtype) / 40 for _ in range(2))
    old[5:45:2] = -math.inf
    rollout[6:46:2] = -math.inf
    possible = old.isfinite() & rollout.isfinite()
    expected = (old.double() - rollout.double())[possible].sum().exp()
    ends = torch.tensor([0, 400])
    options = {"rollout_is": "sequence", "rollout_is_threshold": None}
    weights = rollout_correction(old, rollout, cu_seqlens=ends, **options).weights
    torch.testing.assert_close(weights.double(), expected.expand(400), rtol=1e-5, atol=0)
    metrics = rollout_metrics(old, rollout, cu_seqlens=ends, rollout_is="sequence")
    torch.testing.assert_close(metrics["rollout_is_max"], expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(metrics["chi2_seq"], expected**2 - 1, rtol=1e-4, atol=1e-6)


lengths_lists = st.lists(st.integers(0, 12), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths_lists,
    seed=st.integers(0, 2**16),
    level=st.sampled_from(["token", "sequence", "sequence_mean"]),
    lower=st.sampled_from([None, 0.6]),
    criterion=st.sampled_from(REJECTION_CRITERIA),
)
def test_formulas(lengths, seed, level, lower, criterion):
    inputs = batch(lengths, seed, dtype=torch.float64)
    bound = BOUNDS[criterion[-2:]]
    got = run(
        inputs,
        rollout_is=level,
        rollout_is_threshold=1.4,
        rollout_is_lower=lower,
        rejection={criterion: bound},
    )
    weights, accepted_mask = [0.0] * sum(lengths), [False] * sum(lengths)
    clipped, kl, tokens = 0, 0.0, 0
    for rows, xs in sequences(inputs):
        is_accepted = accepted(criterion, bound, xs)
        for i, (row, x) in enumerate(zip(rows, xs, strict=True)):
            raw = math.exp({"token": x, "sequence": sum(xs)}.get(level, sum(xs) / len(xs)))
            outside = raw > 1.4 or (lower is not None and raw < lower)
            weights[row] = min(raw, 1.4) if lower is None else raw * (not outside)
            accepted_mask[row] = is_accepted[i]
            clipped, kl, tokens = clipped + outside, kl - x, tokens + 1
    assert got.weights.tolist() == pytest.approx(weights)
    assert got.response_mask.tolist() == accepted_mask
    tokens = max(tokens, 1)
    assert got.metrics["kl"].item() == pytest.approx(kl / tokens)
    assert got.metrics["is_clipped_fraction"].item() == pytest.approx(clipped / tokens)
    assert got.metrics["is_weight_mean"].item() == pytest.approx(sum(weights) / tokens)
    rejected = int(inputs["response_mask"].sum()) - sum(accepted_mask)
    assert got.metrics["rejected_fraction"].item() == pytest.approx(rejected / tokens)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_sequences_do_not_see_each_other(level):
    """Any split into micro-batches or ranks gives every token the same weight and rejection."""
    lengths = [5, 17, 70, 1, 33]
    inputs = batch(lengths)
    options = {
        "rollout_is": level,
        "rejection": {"seq_mean_k3": 0.06, "token_k1": (0.5, 2.0)},
        "global_num_tokens": int(inputs["response_mask"].sum()),
    }
    full = run(inputs, **options)
    sums = dict.fromkeys(full.metrics, 0.0)
    for rows, micro_batch in split(inputs, ([3], [4, 0], [2, 1])):
        got = run(micro_batch, **options)
        torch.testing.assert_close(got.weights, full.weights[rows], rtol=1e-6, atol=0)
        assert torch.equal(got.response_mask, full.response_mask[rows])
        for name, value in got.metrics.items():
            join = max if name == "is_weight_max" else float.__add__
            sums[name] = join(sums[name], value.item())
    for name, value in full.metrics.items():
        assert sums[name] == pytest.approx(value.item(), rel=1e-5), name


def test_hostile_input():
    inputs = batch([1, 70_000, 0, 9])
    spoiled = dict(inputs)
    for name in ("old_log_probs", "ref_log_probs"):
        spoiled[name] = inputs[name].masked_fill(~inputs["response_mask"], torch.nan)
    options = {"rollout_is": "sequence", "rejection": {"seq_mean_k3": 1.0}}
    got, want = run(spoiled, **options), run(inputs, **options)
    assert torch.equal(got.weights, want.weights) and got.weights.isfinite().all()
    assert got.metrics == want.metrics
    strided = {
        k: v if k == "cu_seqlens" else v.repeat_interleave(2)[::2] for k, v in inputs.items()
    }
    assert torch.equal(run(strided, **options).weights, want.weights)
    inputs["response_mask"] = torch.zeros_like(inputs["response_mask"])
    for nothing in (inputs, batch([])):
        out = run(nothing, **options)
        assert out.weights.eq(0).all() and not out.response_mask.any()
        assert all(value == 0 for value in out.metrics.values())


X = torch.zeros(4)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rejection": {"token_k2": math.nan}}, r"rejection\['token_k2'\] is nan"),
        ({"rejection": {"token_k2": -1}}, r"rejection\['token_k2'\] is -1"),
        ({"rejection": {"token_k1": (2.0, 0.5)}}, r"rejection\['token_k1'\]\[0\] is 2.0, above"),
        ({"rejection": {"token_k1": (math.nan, 2.0)}}, r"rejection\['token_k1'\]\[0\] is nan"),
        ({"rejection": {"token_k1": (0.5, math.nan)}}, r"rejection\['token_k1'\]\[1\] is nan"),
        ({"rejection": {"token_k1": (0.5,)}}, "expected a pair"),
        ({"cu_seqlens": None}, "give cu_seqlens"),
    ],
)
def test_a_bad_argument_is_named(options, message):
    given = {"rollout_log_probs": X, "cu_seqlens": ints(0, 4), **options}
    with pytest.raises(ValueError, match=f"rollout_correction: .*{message}"):
        rollout_correction(X, **given)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_tokens_of_zero_probability(level):
    old = torch.tensor([-math.inf, -1.0, -1.0, -math.inf, -2.0, -math.inf, -1.5])
    rollout = torch.tensor([-math.inf, -1.5, -math.inf, -1.0, -2.0, -1.0, -1.5])
    ends = ints(0, 2, 5, 7)
    got = rollout_correction(old, rollout, cu_seqlens=ends, rollout_is=level)
    e = math.exp
    want = {
        "token": [1, e(0.5), 2, e(-20), 1, e(-20), 1],
        "sequence": [e(0.5), e(0.5), 1, 1, 1, e(-20), e(-20)],  # infinities of both signs cancel
    }[level]
    assert got.weights.tolist() == pytest.approx(want)
    both = rollout_correction(old[:2], rollout[:2], cu_seqlens=ends[:2], rollout_is=level)
    assert all(value.isfinite() for value in both.metrics.values())
    assert both.metrics["kl"].item() == pytest.approx(-0.25)


def test_rows_are_sequences_and_none_does_not_truncate():
    packed = batch([7, 7, 7], spread=3.0)
    packed["cu_seqlens"] = packed["cu_seqlens"].long()
    padded = {name: value.view(3, 7) for name, value in packed.items() if name != "cu_seqlens"}
    padded |= {"cu_seqlens": None, "response_mask": padded["response_mask"].int()}
    options = {"rollout_is": "sequence", "rejection": {"seq_mean_k3": 0.05}}
    got, want = run(padded, **options), run(packed, **options)
    assert got.weights.shape == got.response_mask.shape == (3, 7)
    assert torch.equal(got.weights.flatten(), want.weights)
    assert torch.equal(got.response_mask.flatten(), want.response_mask)
    free = run(packed, rollout_is_threshold=None)
    rho = (packed["old_log_probs"] - packed["ref_log_probs"]).exp() * packed["response_mask"]
    torch.testing.assert_close(free.weights, rho)
    assert free.metrics["is_clipped_fraction"] == 0


def test_half_precision_is_computed_in_float32():
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch([40]).items()}
    exact = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    assert torch.equal(run(inputs).weights, run(exact).weights)
