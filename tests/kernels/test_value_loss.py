"""value_loss: against its formula in plain Python, any split, hostile input."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import LOSS_AGG_MODES, value_loss
from tests.kernels.batches import assert_close, batch, global_counts, split, to_float64
from tests.tolerances import POLICY_LOSS, POLICY_LOSS_SPLIT

SCALE, CLIP = 50.0, 0.3


def run(inputs, **options):
    """(loss, metrics, gradient) of values, old values and returns from a batch of log-probs."""
    values = inputs["log_probs"].clone().requires_grad_()
    loss, metrics = value_loss(
        values,
        inputs["old_log_probs"],
        inputs["ref_log_probs"],
        response_mask=inputs["response_mask"],
        cu_seqlens=inputs["cu_seqlens"],
        **{"cliprange_value": CLIP, "loss_scale_factor": SCALE, **options},
    )
    return loss.detach(), metrics, torch.autograd.grad(loss, values)[0]


def by_formula(inputs, loss_agg_mode):
    """(loss, clipped fraction, gradient), token by token."""
    names = ("log_probs", "old_log_probs", "ref_log_probs", "response_mask")
    columns = [inputs[name].tolist() for name in names]
    ends = inputs["cu_seqlens"].tolist()
    counts = [sum(columns[3][a:b]) for a, b in pairwise(ends)]
    tokens, sequences = max(sum(counts), 1), max(sum(count > 0 for count in counts), 1)
    loss, clipped, gradient = 0.0, 0, []
    for t, (v, old, target, unmasked) in enumerate(zip(*columns, strict=True)):
        count = counts[next(n for n, end in enumerate(ends[1:]) if t < end)]
        weight = (
            unmasked
            * {
                "token-mean": 1 / tokens,
                "token-sum": 1,
                "seq-mean-token-sum": 1 / sequences,
                "seq-mean-token-mean": 1 / (sequences * max(count, 1)),
                "seq-mean-token-sum-norm": 1 / (sequences * SCALE),
            }[loss_agg_mode]
        )
        near = min(max(v, old - CLIP), old + CLIP)
        is_clipped = (near - target) ** 2 > (v - target) ** 2
        loss += weight * 0.5 * max((near - target) ** 2, (v - target) ** 2)
        clipped += unmasked and is_clipped
        error_gradient = (near - target) * (near == v) if is_clipped else v - target
        gradient.append(weight * error_gradient)
    return loss, clipped / tokens, gradient


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
    loss_agg_mode=st.sampled_from(LOSS_AGG_MODES),
)
def test_formula(lengths, seed, loss_agg_mode):
    inputs = to_float64(batch(lengths, seed))
    loss, metrics, gradient = run(inputs, loss_agg_mode=loss_agg_mode)
    want_loss, want_clipped, want_gradient = by_formula(inputs, loss_agg_mode)
    assert loss.item() == pytest.approx(want_loss)
    assert metrics["vf_clipfrac"].item() == pytest.approx(want_clipped)
    assert gradient.tolist() == pytest.approx(want_gradient)
    single = run(batch(lengths, seed), loss_agg_mode=loss_agg_mode)
    assert_close(single[0], loss, POLICY_LOSS)
    assert_close(single[2], gradient, POLICY_LOSS)


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
def test_any_split_gives_the_same_loss_and_gradient(loss_agg_mode):
    lengths = [5, 17, 70, 1, 33]
    inputs = to_float64(batch(lengths))
    options = {"loss_agg_mode": loss_agg_mode, **global_counts(inputs)}
    full = run(inputs, **options)
    total, clipped, gradient = 0, 0, torch.zeros_like(full[2])
    for rows, micro_batch in split(inputs, ([3], [4, 0], [2, 1])):
        loss, metrics, gradient[rows] = run(micro_batch, **options)
        total, clipped = total + loss, clipped + metrics["vf_clipfrac"]
    assert_close(total, full[0], POLICY_LOSS_SPLIT)
    assert_close(clipped, full[1]["vf_clipfrac"], POLICY_LOSS_SPLIT)
    assert_close(gradient, full[2], POLICY_LOSS_SPLIT)


def test_nothing_is_zero():
    inputs = batch([1, 70_000, 0, 9])
    inputs["response_mask"] = torch.zeros_like(inputs["response_mask"])
    for lengths in (inputs, batch([])):
        for loss_agg_mode in LOSS_AGG_MODES:
            loss, _, gradient = run(lengths, loss_agg_mode=loss_agg_mode)
            assert loss == 0 and gradient.eq(0).all()


def test_what_an_aggregation_needs():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="give cu_seqlens"):
        value_loss(x, x, x, loss_agg_mode="seq-mean-token-sum")
    with pytest.raises(ValueError, match="needs loss_scale_factor"):
        value_loss(x, x, x, loss_agg_mode="seq-mean-token-sum-norm")


def test_rows_are_sequences_and_none_does_not_clip():
    packed = batch([7, 7, 7])
    packed["cu_seqlens"] = packed["cu_seqlens"].long()
    padded = {name: value.view(3, 7) for name, value in packed.items() if name != "cu_seqlens"}
    for mask in (padded["response_mask"].int(), padded["response_mask"].float()):
        rows = {**padded, "response_mask": mask, "cu_seqlens": None}
        for loss_agg_mode in LOSS_AGG_MODES:
            got, want = (run(x, loss_agg_mode=loss_agg_mode) for x in (rows, packed))
            assert torch.equal(got[0], want[0]) and torch.equal(got[2].flatten(), want[2])
    arguments = [packed[name] for name in ("log_probs", "old_log_probs", "ref_log_probs")]
    free = value_loss(*arguments, cliprange_value=None)
    assert torch.equal(free[0], value_loss(*arguments, cliprange_value=math.inf)[0])
    assert_close(free[0], 0.5 * (arguments[0] - arguments[2]).square().mean(), POLICY_LOSS)


def test_half_precision_is_computed_in_float32():
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch([40]).items()}
    exact = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    got, want = run(inputs), run(exact)
    assert got[0].dtype == torch.float32 and torch.equal(got[0], want[0])
    assert got[2].dtype == torch.bfloat16 and torch.equal(got[2], want[2].bfloat16())


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
def test_kernel_as_the_reference(loss_agg_mode):
    inputs = batch([5, 0, 1030, 33], spread=2.0)
    for cliprange_value in (0.0, 0.3, None):
        options = {"loss_agg_mode": loss_agg_mode, "cliprange_value": cliprange_value}
        got = run(inputs, backend="cpp", **options)
        want = run(to_float64(inputs), backend="reference", **options)
        assert_close(got[0], want[0], POLICY_LOSS)
        assert_close(got[2], want[2], POLICY_LOSS)
        assert got[1].keys() == want[1].keys()
        for name in want[1]:
            assert_close(got[1][name], want[1][name], POLICY_LOSS)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["log_probs", "old_log_probs", "ref_log_probs"])
def test_values_that_are_not_finite_as_in_the_reference(name, bad):
    inputs = batch([20])
    inputs["response_mask"][3] = True
    inputs[name][3] = bad
    got, want = run(inputs, backend="cpp"), run(inputs, backend="reference")
    torch.testing.assert_close(got[0], want[0], equal_nan=True)
    torch.testing.assert_close(got[2], want[2], equal_nan=True)


def test_second_derivatives_and_forward_mode():
    inputs = to_float64(batch([9]))
    values = inputs["log_probs"].requires_grad_()

    def loss(values):
        return value_loss(values, inputs["old_log_probs"], inputs["ref_log_probs"])[0]

    assert torch.autograd.gradcheck(loss, values, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, values)
