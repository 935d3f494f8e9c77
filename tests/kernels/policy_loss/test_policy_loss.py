"""Policy loss: every backend against the float64 oracle, and the oracle against the papers.

The oracle itself is checked in test_policy_loss_terms.py, formula by formula.
"""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import (
    LOSS_AGG_MODES,
    LOSS_MODES,
    policy_loss,
    rollout_correction,
    token_policy_loss,
)
from hybridengine.kernels.policy_loss.terms import LossOptions
from tests.kernels.batches import (
    FURTHER_OPTIONS,
    KL,
    aggregated,
    assert_close,
    assert_same,
    batch,
    global_counts,
    impossible_tokens,
    run,
    run_tokens,
    split,
    to_float64,
)
from tests.tolerances import POLICY_LOSS, POLICY_LOSS_SPLIT

BACKENDS = ["cpp"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_every_mode_and_aggregation(backend, loss_mode, loss_agg_mode):
    inputs, options, exact = aggregated(loss_mode, loss_agg_mode)
    assert_same(run(inputs, backend=backend, **options), exact)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", FURTHER_OPTIONS)
def test_further_options(options, backend):
    inputs = impossible_tokens(batch([5, 0, 70, 1, 33], spread=1.0), "both")
    options = {"loss_agg_mode": "seq-mean-token-mean"} | options
    exact = run(to_float64(inputs), backend="reference", **options)
    assert_same(run(inputs, backend=backend, **options), exact)
    default = run(inputs, backend=backend, loss_mode=options.get("loss_mode", "ppo_clip"))
    assert not torch.equal(default[2], run(inputs, backend=backend, **options)[2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss_mode", [mode for mode in LOSS_MODES if mode != "gmpo"])
def test_losses_of_the_tokens(loss_mode, backend):
    """Every backend as the float64 reference, and their sum as policy_loss."""
    inputs = batch([5, 0, 70, 1, 33, 1030, 16])
    inputs["log_probs"][~inputs["response_mask"]] = math.nan
    exact = run_tokens(to_float64(inputs), loss_mode=loss_mode, backend="reference")
    got = run_tokens(inputs, loss_mode=loss_mode, backend=backend)
    for one, want in zip(got, exact, strict=True):
        assert_close(one, want, POLICY_LOSS)
        assert not one[~inputs["response_mask"]].any()
    sums = {"loss_mode": loss_mode, "loss_agg_mode": "token-sum", "global_num_tokens": 1}
    loss, metrics, *_ = run(to_float64(inputs), backend="reference", **sums)
    assert_close(exact[0].sum(), loss, POLICY_LOSS_SPLIT)
    for name, value in zip(
        ("kl_loss", "ratio_mean", "pg_clipfrac", "pg_clipfrac_lower"), exact[1:5], strict=True
    ):
        assert_close(value.sum(), metrics[name], POLICY_LOSS_SPLIT)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("shift", [-1e-3, 0.0, 0.3])
def test_sequence_ratio_of_100_000_tokens(shift, backend):
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(10**5, generator=generator)
    new = old + shift + 0.01 * (torch.rand(10**5, generator=generator) - 0.5)
    _, metrics = policy_loss(
        new,
        old,
        torch.ones(10**5),
        loss_mode="gspo",
        cu_seqlens=torch.tensor([0, 10**5]),
        backend=backend,
    )
    mean = math.fsum((new.double() - old.double()).tolist()) / 10**5
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(mean), rel=5e-7)


def test_losses_of_the_tokens_keep_the_shape_and_name_what_they_do_not_take():
    x = torch.zeros(2, 3, requires_grad=True)
    losses = token_policy_loss(x, None, torch.ones(2, 3), loss_mode="gspo")
    assert all(one.shape == (2, 3) for one in losses) and losses.clipped.dtype == torch.bool
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        grad = torch.autograd.grad(losses.loss.sum(), x, create_graph=True)[0]
        torch.autograd.grad(grad.sum(), x)
    with pytest.raises(TypeError, match="loss_agg_mode is not an argument"):
        token_policy_loss(x, None, x, loss_agg_mode="token-sum")
    for options in ({"loss_mode": "gmpo"}, {"loss_mode": "gspo", "kl_times_ratio": True}):
        with pytest.raises(ValueError, match="token_policy_loss: loss_mode is"):
            token_policy_loss(x, None, x, **options)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("bounds", [{}, {"rollout_is_lower": 0.6, "rollout_is_threshold": 1.5}])
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_old_log_probs_and_importance_weights_formed_inside(loss_mode, bounds, backend):
    """The same bits as with the tensors that a caller would make of the log-probs."""
    inputs = impossible_tokens(batch([5, 0, 70, 1, 33]), "both")
    del inputs["rollout_is_weights"]
    rollout = inputs["ref_log_probs"].clone()
    rollout[~inputs["response_mask"]] = math.nan
    options = {"loss_mode": loss_mode, "backend": backend}
    for old in (inputs["log_probs"], inputs["old_log_probs"]):
        correction = rollout_correction(
            old,
            rollout,
            cu_seqlens=inputs["cu_seqlens"],
            response_mask=inputs["response_mask"],
            **bounds,
        )
        outside = {"old_log_probs": old, "rollout_is_weights": correction.weights}
        inside = {"old_log_probs": None if old is inputs["log_probs"] else old}
        want = run(inputs | outside, **options)
        got = run(inputs | inside, rollout_log_probs=rollout, **bounds, **options)
        assert_same(got, want, {"rtol": 0.0, "atol": 0.0})


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
    loss_mode=st.sampled_from(LOSS_MODES),
    loss_agg_mode=st.sampled_from(LOSS_AGG_MODES),
    kl_type=st.sampled_from(KL),
    spread=st.sampled_from([0.0, 0.1, 2.0]),
    impossible=st.booleans(),
    low=st.sampled_from([0.1, 0.2]),
    high=st.sampled_from([0.2, 0.28]),
)
def test_random_batches(
    backend, lengths, seed, loss_mode, loss_agg_mode, kl_type, spread, impossible, low, high
):
    inputs = batch(lengths, seed, spread)
    if impossible:
        inputs = impossible_tokens(inputs, "both")
    options = {
        "loss_mode": loss_mode,
        "loss_agg_mode": loss_agg_mode,
        "kl_type": kl_type,
        "clip_ratio_low": low,
        "clip_ratio_high": high,
        "global_num_tokens": 100,
        "global_num_seqs": torch.tensor(9.0),
    }
    exact = run(to_float64(inputs), backend="reference", **options)
    assert_same(run(inputs, backend=backend, **options), exact)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_masked_tokens_may_hold_anything(backend):
    inputs = batch([20, 30, 7])
    spoiled = dict(inputs)
    for name, value in inputs.items():
        if value.is_floating_point():
            spoiled[name] = value.masked_fill(~inputs["response_mask"], float("nan"))
    for loss_mode in LOSS_MODES:
        options = {"loss_mode": loss_mode, "loss_agg_mode": "seq-mean-token-mean"}
        assert_same(
            run(spoiled, backend=backend, **options),
            run(inputs, backend=backend, **options),
            {"rtol": 0, "atol": 0},
        )


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("lengths", [[], [0], [9, 0, 4]])
def test_nothing_to_learn_from_is_zero(backend, lengths):
    inputs = batch(lengths)
    inputs["response_mask"] = torch.zeros(sum(lengths), dtype=torch.bool)
    for loss_mode in LOSS_MODES:
        for loss_agg_mode in LOSS_AGG_MODES:
            loss, metrics, gradient, entropy_gradient = run(
                inputs, backend=backend, loss_mode=loss_mode, loss_agg_mode=loss_agg_mode
            )
            assert loss == 0 and gradient.eq(0).all() and entropy_gradient.eq(0).all()
            assert metrics.pop("ratio_max") == -math.inf
            assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_any_split_gives_the_same_loss_and_gradient(backend, loss_mode, loss_agg_mode):
    lengths = [5, 17, 70, 1, 33, 16, 129, 3]
    inputs = to_float64(batch(lengths)) if backend == "reference" else batch(lengths)
    options = {
        "loss_mode": loss_mode,
        "loss_agg_mode": loss_agg_mode,
        "backend": backend,
        **global_counts(inputs),
    }
    full = run(inputs, **options)
    total, sums, gradient = 0, {}, torch.zeros_like(full[2])
    # Sequences out of order, in unequal parts.
    for rows, micro_batch in split(inputs, ([3], [7, 0], [2, 5, 1], [4, 6])):
        loss, metrics, gradient[rows], _ = run(micro_batch, **options)
        total = total + loss
        for name, value in metrics.items():
            old = sums.get(name, torch.zeros_like(value))
            sums[name] = torch.maximum(old, value) if name == "ratio_max" else old + value
    tolerance = POLICY_LOSS_SPLIT if backend == "reference" else POLICY_LOSS
    assert_close(total, full[0], tolerance)
    for name, value in full[1].items():
        assert_close(sums[name], value, tolerance)
    assert_close(gradient, full[2], tolerance)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_padding_does_not_change_the_loss(backend, loss_mode):
    """Padded rows laid end to end, padding masked, against the same tokens packed."""
    lengths, width = [5, 17, 1, 33, 16], 40
    packed = batch(lengths) if backend == "cpp" else to_float64(batch(lengths))
    where = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    padded = {"cu_seqlens": torch.arange(0, 5 * width + 1, width, dtype=torch.int32)}
    for name, value in packed.items():
        if name != "cu_seqlens":
            fill = torch.nan if value.is_floating_point() else False
            padded[name] = value.new_full((5 * width,), fill)
            padded[name][where.flatten()] = value
    for loss_agg_mode in LOSS_AGG_MODES:
        options = {"loss_mode": loss_mode, "loss_agg_mode": loss_agg_mode, "backend": backend}
        got, want = run(padded, **options), run(packed, **options)
        tolerance = POLICY_LOSS_SPLIT if backend == "reference" else POLICY_LOSS
        assert_close(got[0], want[0], tolerance)
        assert_close(got[2][where.flatten()], want[2], tolerance)
        assert got[2][~where.flatten()].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_one_sequence_of_70000_tokens(backend, loss_mode):
    inputs = batch([1, 70_000, 0])
    options = {"loss_mode": loss_mode, "loss_agg_mode": "seq-mean-token-mean"}
    exact = run(to_float64(inputs), backend="reference", **options)
    assert_same(run(inputs, backend=backend, **options), exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ratios_far_from_one_stay_finite(backend):
    inputs = batch([64])
    inputs["log_probs"] = torch.linspace(-200, -0.01, 64)
    for loss_mode in LOSS_MODES:
        if loss_mode in ("cispo", "dppo_tv", "dppo_kl", "reinforce", "gspo", "gmpo"):
            continue  # their loss holds log_probs themselves, or a mean
        ours = run(inputs, backend=backend, loss_mode=loss_mode)
        exact = run(to_float64(inputs), backend="reference", loss_mode=loss_mode)
        assert ours[2].isfinite().all()
        assert_same(ours, exact, {"rtol": 1e-4, "atol": 1e-4})


def test_a_second_backward_and_a_scaled_one():
    inputs = batch([30])
    log_probs = inputs["log_probs"].requires_grad_()
    loss, _ = policy_loss(log_probs, inputs["old_log_probs"], inputs["advantages"])
    first = torch.autograd.grad(loss, log_probs, retain_graph=True)[0].clone()
    torch.autograd.backward(loss, retain_graph=True)
    log_probs.grad.mul_(5)  # what a user does to a gradient stays with the user
    assert torch.equal(torch.autograd.grad(loss, log_probs, retain_graph=True)[0], first)
    assert torch.equal(torch.autograd.grad(loss * 4, log_probs)[0], first * 4)


def test_only_requested_gradients_are_computed():
    inputs = batch([8])
    arguments = [inputs[k] for k in ("log_probs", "old_log_probs", "advantages")]
    loss, _ = policy_loss(*arguments)
    assert not loss.requires_grad
    loss, _ = policy_loss(*arguments, entropy=inputs["entropy"].requires_grad_(), entropy_coeff=1.0)
    loss.backward()
    assert torch.equal(inputs["entropy"].grad, torch.full((8,), -1 / 8))


def test_strided_and_half_precision_inputs():
    inputs = batch([40])
    wide = {k: v.repeat_interleave(2) if k != "cu_seqlens" else v for k, v in inputs.items()}
    strided = {k: v[::2] if k != "cu_seqlens" else v for k, v in wide.items()}
    assert_same(run(strided), run(inputs), {"rtol": 0, "atol": 0})
    half = inputs["log_probs"].bfloat16().requires_grad_()
    loss, _ = policy_loss(half, inputs["old_log_probs"], inputs["advantages"])
    loss.backward()
    assert loss.dtype == torch.float32 and half.grad.dtype == torch.bfloat16


def test_errors_name_what_is_wrong():
    x = torch.zeros(4)
    for arguments, message in (
        ({"loss_mode": "pop"}, "loss_mode is 'pop'"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode is 'mean'"),
        ({"kl_type": "k4"}, "kl_type is 'k4'"),
        ({"loss_mode": "gspo"}, "give cu_seqlens"),
        ({"loss_agg_mode": "seq-mean-token-sum"}, "give cu_seqlens"),
        ({"loss_mode": "kl_cov"}, "needs selected"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c is 1.0"),
        ({"kl_input_clamp": 100.0}, "kl_input_clamp is 100.0; expected a finite number above 0"),
        ({"kl_output_clamp": 0.0}, "kl_output_clamp is 0.0"),
        ({"seq_num_tokens": torch.ones(2)}, "seq_num_tokens is given with loss_agg_mode"),
        (
            {"loss_mode": "gmpo", "kl_times_ratio": True, "cu_seqlens": torch.tensor([0, 4])},
            "kl_times_ratio is given with loss_mode 'gmpo'",
        ),
        ({"entropy": torch.zeros(3)}, r"entropy has shape \[3\]; expected \[4\]"),
        (
            {"loss_agg_mode": "seq-mean-token-sum-norm", "cu_seqlens": torch.tensor([0, 4])},
            "needs loss_scale_factor",
        ),
        (
            {"loss_agg_mode": "seq-mean-token-mean", "cu_seqlens": torch.tensor([0, 5])},
            "cu_seqlens ends at 5, but there are 4 tokens",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            policy_loss(x, x, x, **{"backend": "cpp", **arguments})
    with pytest.raises(ValueError, match=r"log_probs has shape \[1, 2, 2\]"):
        policy_loss(*[x.view(1, 2, 2)] * 3)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
def test_counts_may_be_numbers_tensors_or_left_out(loss_agg_mode, masked):
    inputs = batch([6, 0, 4, 9])
    if not masked:
        del inputs["response_mask"]
    counts = {
        "global_num_tokens": (None, 31, torch.tensor(31)),
        "global_num_seqs": (None, 7.5, torch.tensor([7.5])),
    }
    for tokens, seqs in product(*counts.values()):
        options = {
            "loss_agg_mode": loss_agg_mode,
            "global_num_tokens": tokens,
            "global_num_seqs": seqs,
        }
        got = run(inputs, backend="cpp", **options)
        assert_same(got, run(to_float64(inputs), backend="reference", **options))


def test_counts_in_memory_and_counted_ones_mix():
    """As on a GPU, where a tensor is not read: its values are in `denominators`, NaN is counted."""
    inputs = batch([6, 0, 4, 9])
    tensors = [inputs["log_probs"], None, inputs["old_log_probs"], inputs["advantages"]]
    tensors += [inputs["response_mask"], None, None, None, inputs["cu_seqlens"], None]
    modes = [LOSS_MODES.index("ppo_clip"), LOSS_AGG_MODES.index("seq-mean-token-sum"), 3]
    modes += [0, 0, 0, 1, 0]
    numbers = [*LossOptions(), 0.0, 0.0, 1.0]
    op, nan = torch.ops.hybridengine.policy_loss, math.nan
    for counts in ((nan, 7.5), (31.0, nan), (31.0, 7.5)):
        want = op(*tensors, None, modes, [*numbers, *counts], "cpp")
        in_memory = torch.tensor(counts, dtype=torch.float64)
        flags = [nan if math.isnan(count) else 1.0 for count in counts]
        got = op(*tensors, in_memory, modes, [*numbers, *flags], "cpp")
        assert all(map(torch.equal, got, want))
