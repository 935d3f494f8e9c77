"""The padded layer against the flat operators: padding on the left and right, holes, empty rows."""

import math

import numpy as np
import pytest
import torch

from hybridengine import kernels
from hybridengine.integrations import padded
from hybridengine.kernels._aggregation import LOSS_AGG_MODES
from tests import tolerances
from tests.kernels.batches import random_mask

B, L, V, H = 5, 7, 13, 6
KINDS = ("prefix", "suffix", "scattered")


def masked(kind):
    """A mask with an empty row and a full one."""
    mask = random_mask(B, L, 3, kind)
    mask[1], mask[2] = False, True
    return mask


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape)))


def with_garbage(values, mask):
    """NaN in the masked positions."""
    return torch.where(mask.reshape(*mask.shape, *[1] * (values.dim() - 2)), values, torch.nan)


def flat(values, mask):
    return values[mask]


def cu_seqlens(mask):
    return torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()


def assert_close(got, expected, **tolerance):
    tolerance = tolerance or tolerances.LINEAR
    torch.testing.assert_close(got.double(), expected.double(), **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_token_log_probs(kind):
    mask, ids = masked(kind), torch.arange(B * L).reshape(B, L) % V
    logits = with_garbage(draw(B, L, V), mask).requires_grad_()
    got = padded.token_log_probs(logits, ids, 0.7, response_mask=mask)
    grad = torch.autograd.grad(sum(got).sum(), logits)[0]
    leaf = flat(logits.detach(), mask).double().requires_grad_()
    expected = kernels.token_log_probs(leaf, flat(ids, mask), 0.7)
    expected_grad = torch.autograd.grad(sum(expected).sum(), leaf)[0]
    for result, want in zip(got, expected, strict=True):
        assert_close(flat(result, mask), want, **tolerances.LOG_PROB)
        assert not result[~mask].any()
    assert_close(flat(grad, mask), expected_grad, **tolerances.LOG_PROB_GRAD)
    assert not grad[~mask].any()
    alone = padded.token_entropy(logits.detach(), 0.7, row_mask=mask)
    assert_close(alone, got[1], **tolerances.LOG_PROB)


def test_entries_of_every_position():
    mask = masked("suffix")
    logits, ids = with_garbage(draw(B, L, V), mask), draw(B, L, V).topk(3).indices
    log_probs, entropy = padded.token_log_probs(logits, ids, response_mask=mask)
    want, want_entropy = kernels.token_log_probs(flat(logits, mask).double(), flat(ids, mask))
    assert_close(flat(log_probs, mask), want, **tolerances.LOG_PROB)
    assert_close(flat(entropy, mask), want_entropy, **tolerances.LOG_PROB)
    assert not log_probs[~mask].any()


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_the_tokens(kind):
    mask, advantages = masked(kind), draw(B, seed=4)
    inputs = loss_inputs(mask)
    old = inputs.pop("old_log_probs")
    log_probs = (old + 0.3 * draw(B, L, seed=5)).requires_grad_()
    got = padded.token_policy_loss(log_probs, old, advantages, mask, kl_coef=0.1, **inputs)
    loss, _ = padded.policy_loss(log_probs, old, advantages, mask, kl_coef=0.1, **inputs)
    again = padded.aggregate(got.loss, mask)
    assert_close(again, loss, **tolerances.POLICY_LOSS)
    grads = (torch.autograd.grad(one, log_probs)[0] for one in (again, loss))
    assert_close(*grads, **tolerances.POLICY_LOSS)
    phi = padded.vespo_weights(log_probs, old, advantages, mask)
    w = flat_sums(log_probs.detach() - old, mask).exp()
    k = torch.where(advantages >= 0, 2.0, 3.0)
    rate = torch.where(advantages >= 0, 3.0, 2.0)
    want = (rate + k * w.log() - rate * w).exp()
    assert_close(phi, torch.where(mask, want[:, None], 0), **tolerances.POLICY_LOSS)


def flat_sums(values, mask):
    return torch.where(mask, values, 0).sum(1)


def test_a_mask_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match="response_mask has shape \\[5\\]; expected \\[5, 7\\]"):
        padded.token_log_probs(draw(B, L, V), torch.zeros(B, L).long(), response_mask=torch.ones(B))
    with pytest.raises(ValueError, match="hidden has shape"):
        padded.linear_token_log_probs(
            draw(B, L + 1, H), draw(V, H), torch.zeros(B, L).long(), response_mask=torch.ones(B, L)
        )
    with pytest.raises(ValueError, match="row_mask"):
        padded.token_entropy(draw(B, L, V), row_mask=torch.ones(B, V))


@pytest.mark.parametrize("kind", (*KINDS, None))
def test_linear_token_log_probs(kind):
    mask = torch.ones(B, L).bool() if kind is None else masked(kind)
    ids = torch.where(mask, torch.arange(B * L).reshape(B, L) % V, -7)  # no label of any kind
    temperature = with_garbage(draw(B, L).exp(), mask)
    vocab_mask = draw(B, L, V) < 0.9
    vocab_mask.scatter_(2, ids.clamp(min=0)[..., None], True)
    hidden, weight = (
        with_garbage(draw(B, L, H), mask).requires_grad_(),
        draw(V, H).requires_grad_(),
    )
    given = None if kind is None else mask
    got = padded.linear_token_log_probs(
        hidden, weight, ids, temperature, response_mask=given, vocab_mask=vocab_mask
    )
    grads = torch.autograd.grad(sum(got).sum(), (hidden, weight))
    leaves = [t.detach().double().requires_grad_() for t in (flat(hidden, mask), weight)]
    expected = kernels.token_log_probs(
        leaves[0] @ leaves[1].T,
        flat(ids, mask),
        flat(temperature, mask).double(),
        vocab_mask=flat(vocab_mask, mask),
    )
    expected_grads = torch.autograd.grad(sum(expected).sum(), leaves)
    for result, want in zip(got, expected, strict=True):
        assert_close(flat(result, mask), want)
        assert not result[~mask].any()
    assert_close(flat(grads[0], mask), expected_grads[0])
    assert not grads[0][~mask].any()
    assert_close(grads[1], expected_grads[1])


def loss_inputs(mask):
    old = -draw(B, L, seed=1).abs()
    per_token = {"old_log_probs": old, "ref_log_probs": old + 0.2, "rollout_log_probs": old - 0.1}
    return {name: with_garbage(value, mask) for name, value in per_token.items()}


@pytest.mark.parametrize("agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_policy_losses(kind, agg_mode):
    """From log-probs and from hidden states, as the flat operator in float64 on the tokens."""
    mask, ids = masked(kind), torch.arange(B * L).reshape(B, L) % V
    inputs, advantages = loss_inputs(mask), draw(B, seed=4)
    options = {"loss_agg_mode": agg_mode, "loss_scale_factor": 9.0, "kl_coef": 0.1}
    hidden, weight = (
        with_garbage(draw(B, L, H), mask).requires_grad_(),
        draw(V, H).requires_grad_(),
    )
    log_probs, _ = padded.linear_token_log_probs(hidden, weight, ids, response_mask=mask)
    arguments = inputs | options
    old = arguments.pop("old_log_probs")
    loss, metrics = padded.policy_loss(log_probs, old, advantages, mask, **arguments)
    grads = torch.autograd.grad(loss, (hidden, weight))
    fused, fused_log_probs, _, fused_metrics = padded.linear_policy_loss(
        hidden, weight, ids, advantages=advantages[:, None], response_mask=mask, **inputs, **options
    )
    fused_grads = torch.autograd.grad(fused, (hidden, weight))

    leaves = [t.detach().double().requires_grad_() for t in (flat(hidden, mask), weight)]
    exact, _ = kernels.token_log_probs(leaves[0] @ leaves[1].T, flat(ids, mask))
    rest = {name: flat(value, mask).double() for name, value in inputs.items()}
    expected, expected_metrics = kernels.policy_loss(
        exact,
        rest.pop("old_log_probs"),
        flat(advantages[:, None].expand(B, L), mask).double(),
        cu_seqlens=cu_seqlens(mask),
        **rest,
        **options,
    )
    want = torch.autograd.grad(expected, leaves)
    for one, got, of in ((loss, grads, metrics), (fused, fused_grads, fused_metrics)):
        assert_close(one, expected)
        assert_close(flat(got[0], mask), want[0])
        assert not got[0][~mask].any()
        assert_close(got[1], want[1])
        for name, value in expected_metrics.items():
            assert_close(of[name], value)
    assert_close(fused_log_probs, log_probs)
    assert not fused_log_probs[~mask].any()


def test_without_a_mask_and_without_old_log_probs():
    ids, advantages = torch.arange(B * L).reshape(B, L) % V, draw(B)
    hidden, weight = draw(B, L, H), draw(V, H)
    log_probs, _ = padded.linear_token_log_probs(hidden, weight, ids)
    loss, _ = padded.policy_loss(log_probs, None, advantages)
    fused, *_ = padded.linear_policy_loss(
        hidden, weight, ids, old_log_probs=None, advantages=advantages
    )
    assert_close(loss, -advantages.mean())
    assert_close(fused, loss)


def test_weights_of_one_number_per_sequence():
    mask, advantages, weights = masked("suffix"), draw(B, L), draw(B, seed=2).exp()
    log_probs = -draw(B, L).abs()
    got, _ = padded.policy_loss(
        log_probs, None, advantages, mask, rollout_is_weights=weights[:, None]
    )
    expected = -(advantages * weights[:, None])[mask].mean()
    assert_close(got, expected)
    with pytest.raises(ValueError, match="advantages has shape \\[7\\]; expected \\[B\\]"):
        padded.policy_loss(log_probs, None, advantages[0], mask)


def test_all_masked():
    mask, ids = torch.zeros(B, L).bool(), torch.zeros(B, L).long()
    hidden, weight = draw(B, L, H).requires_grad_(), draw(V, H).requires_grad_()
    loss, log_probs, *_ = padded.linear_policy_loss(
        hidden, weight, ids, old_log_probs=None, advantages=draw(B), response_mask=mask
    )
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0 and not log_probs.any() and not any(grad.any() for grad in grads)
    assert padded.aggregate(torch.full((B, L), math.nan), mask).item() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_gae_skips_masked_positions(kind):
    mask = masked(kind)
    rewards, values = (with_garbage(draw(B, L, seed=s), mask) for s in (1, 2))
    got = padded.gae(rewards, values, response_mask=mask, gamma=0.9, lam=0.8)
    expected = kernels.gae(
        *(flat(x, mask).double() for x in (rewards, values)), cu_seqlens(mask), gamma=0.9, lam=0.8
    )
    for one, want in zip(got, expected, strict=True):
        assert_close(flat(one, mask), want, **tolerances.ADVANTAGE)
        assert not one[~mask].any()


@pytest.mark.parametrize("kind", KINDS)
def test_group_advantage_and_value_loss(kind):
    mask, rewards = masked(kind), draw(B)
    names = ["a", "b", "a", "b", "c"]
    for ids in (names, np.array(names, dtype=object), torch.tensor([7, 3, 7, 3, 5])):
        assert padded.group_ids(ids).tolist() == [0, 1, 0, 1, 2]
    per_row = padded.group_advantage(rewards, names)
    expected = kernels.group_advantage(rewards.double(), torch.tensor([0, 1, 0, 1, 2]))
    assert_close(per_row, expected, **tolerances.ADVANTAGE)
    per_token = padded.group_advantage(rewards, names, mask)
    assert torch.equal(per_token, torch.where(mask, per_row[:, None], 0))
    values, old, returns = (with_garbage(draw(B, L, seed=s), mask) for s in range(3))
    loss, _ = padded.value_loss(values, old, returns, response_mask=mask)
    want, _ = kernels.value_loss(*(flat(x, mask).double() for x in (values, old, returns)))
    assert_close(loss, want, **tolerances.POLICY_LOSS)


@pytest.mark.parametrize("agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_aggregate_is_what_policy_loss_does(kind, agg_mode):
    """A policy loss of ratio 1 is minus the aggregated advantages."""
    mask = masked(kind)
    losses = with_garbage(draw(B, L), mask).requires_grad_()
    options = {"loss_agg_mode": agg_mode, "loss_scale_factor": 9.0, "global_num_seqs": 6}
    got = padded.aggregate(losses, mask, **options)
    grad = torch.autograd.grad(got, losses)[0]
    log_probs = torch.zeros(B, L, requires_grad=True)
    expected, _ = padded.policy_loss(log_probs, None, -losses.detach(), mask, **options)
    assert_close(got, expected, **tolerances.POLICY_LOSS)
    ones = torch.ones(B, L)
    weights = padded.policy_loss(log_probs, None, -ones, mask, **options)[0]
    assert_close(grad, torch.autograd.grad(weights, log_probs)[0], **tolerances.POLICY_LOSS)


def test_aggregate_with_the_lengths_of_the_whole_sequences():
    """Two halves of every sequence, as two ranks have them, add up to the whole."""
    mask, losses = masked("scattered"), draw(B, L)
    whole = padded.aggregate(losses, mask, "seq-mean-token-mean")
    lengths = mask.sum(1)
    counts = {"seq_num_tokens": lengths, "global_num_seqs": int((lengths > 0).sum())}
    halves = [
        padded.aggregate(losses[:, part], mask[:, part], "seq-mean-token-mean", **counts)
        for part in (slice(0, 3), slice(3, None))
    ]
    assert_close(sum(halves), whole, **tolerances.POLICY_LOSS)
    with pytest.raises(ValueError, match="seq_num_tokens is given with loss_agg_mode 'token-mean'"):
        padded.aggregate(losses, mask, seq_num_tokens=lengths)
    with pytest.raises(ValueError, match="seq_num_tokens has shape"):
        padded.aggregate(losses, mask, "seq-mean-token-mean", seq_num_tokens=lengths[:2])
