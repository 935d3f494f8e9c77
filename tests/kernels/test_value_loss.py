"""value_loss: against its formula in plain Python, any split, hostile input."""

from itertools import pairwise

import pytest
import torch
from hybridengine.kernels import LOSS_AGG_MODES, value_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.policy_batches import batch, close, doubled
from tests.tolerances import POLICY_LOSS, POLICY_LOSS_SPLIT

SCALE, CLIP = 50.0, 0.3


def run(inputs, **options):
    """(loss, metrics, gradient); values stand in log_probs, old values and returns beside them."""
    values = inputs["log_probs"].clone().requires_grad_()
    loss, metrics = value_loss(
        values,
        inputs["old_log_probs"],
        inputs["ref_log_probs"],
        response_mask=inputs["response_mask"],
        cu_seqlens=inputs["cu_seqlens"],
        cliprange_value=CLIP,
        loss_scale_factor=SCALE,
        **options,
    )
    return loss.detach(), metrics, torch.autograd.grad(loss, values)[0]


def by_formula(inputs, loss_agg_mode):
    """(loss, clipped share, gradient), token by token."""
    names = ("log_probs", "old_log_probs", "ref_log_probs", "response_mask")
    columns = [inputs[name].tolist() for name in names]
    ends = inputs["cu_seqlens"].tolist()
    counts = [sum(columns[3][a:b]) for a, b in pairwise(ends)]
    tokens, sequences = max(sum(counts), 1), max(sum(count > 0 for count in counts), 1)
    loss, clipped, gradient = 0.0, 0, []
    for t, (v, old, target, keep) in enumerate(zip(*columns, strict=True)):
        count = counts[next(n for n, end in enumerate(ends[1:]) if t < end)]
        weight = (
            keep
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
        clipped += keep and is_clipped
        slope = (near - target) * (near == v) if is_clipped else v - target
        gradient.append(weight * slope)
    return loss, clipped / tokens, gradient


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
    loss_agg_mode=st.sampled_from(LOSS_AGG_MODES),
)
def test_formula(lengths, seed, loss_agg_mode):
    inputs = doubled(batch(lengths, seed))
    loss, metrics, gradient = run(inputs, loss_agg_mode=loss_agg_mode)
    want_loss, want_clipped, want_gradient = by_formula(inputs, loss_agg_mode)
    assert loss.item() == pytest.approx(want_loss)
    assert metrics["vf_clipfrac"].item() == pytest.approx(want_clipped)
    assert gradient.tolist() == pytest.approx(want_gradient)
    single = run(batch(lengths, seed), loss_agg_mode=loss_agg_mode)
    close(single[0], loss, POLICY_LOSS)
    close(single[2], gradient, POLICY_LOSS)


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
def test_any_split_gives_the_same_loss_and_gradient(loss_agg_mode):
    lengths = [5, 17, 70, 1, 33]
    inputs = doubled(batch(lengths))
    ends, mask = inputs["cu_seqlens"], inputs["response_mask"]
    counts = [int(mask[a:b].sum()) for a, b in pairwise(ends)]
    options = {
        "loss_agg_mode": loss_agg_mode,
        "global_num_tokens": sum(counts),
        "global_num_seqs": sum(count > 0 for count in counts),
    }
    whole = run(inputs, **options)
    total, clipped, gradient = 0, 0, torch.zeros_like(whole[2])
    for part in ([3], [4, 0], [2, 1]):
        rows = torch.cat([torch.arange(ends[n], ends[n + 1]) for n in part])
        piece = {name: value[rows] for name, value in inputs.items() if name != "cu_seqlens"}
        piece["cu_seqlens"] = torch.tensor([0] + [lengths[n] for n in part]).cumsum(0).int()
        loss, metrics, gradient[rows] = run(piece, **options)
        total, clipped = total + loss, clipped + metrics["vf_clipfrac"]
    close(total, whole[0], POLICY_LOSS_SPLIT)
    close(clipped, whole[1]["vf_clipfrac"], POLICY_LOSS_SPLIT)
    close(gradient, whole[2], POLICY_LOSS_SPLIT)


def test_masked_values_may_hold_anything_and_nothing_is_zero():
    inputs = batch([1, 70_000, 0, 9])
    spoiled = dict(inputs)
    for name in ("log_probs", "old_log_probs", "ref_log_probs"):
        spoiled[name] = inputs[name].masked_fill(~inputs["response_mask"], torch.nan)
    for got, want in zip(run(spoiled)[::2], run(inputs)[::2], strict=True):
        assert torch.equal(got, want)
    inputs["response_mask"] = torch.zeros_like(inputs["response_mask"])
    for lengths in (inputs, batch([])):
        for loss_agg_mode in LOSS_AGG_MODES:
            loss, _, gradient = run(lengths, loss_agg_mode=loss_agg_mode)
            assert loss == 0 and gradient.eq(0).all()


def test_strided_values_and_errors():
    inputs = batch([40])
    strided = {
        k: v if k == "cu_seqlens" else v.repeat_interleave(2)[::2] for k, v in inputs.items()
    }
    assert torch.equal(run(strided)[2], run(inputs)[2])
    x = torch.zeros(4)
    with pytest.raises(ValueError, match=r"returns has shape \[3\]; expected \[4\] like values"):
        value_loss(x, x, torch.zeros(3))
    with pytest.raises(ValueError, match="loss_agg_mode is 'mean'"):
        value_loss(x, x, x, loss_agg_mode="mean")
    with pytest.raises(ValueError, match="give cu_seqlens"):
        value_loss(x, x, x, loss_agg_mode="seq-mean-token-sum")
    with pytest.raises(ValueError, match="needs loss_scale_factor"):
        value_loss(x, x, x, loss_agg_mode="seq-mean-token-sum-norm")
