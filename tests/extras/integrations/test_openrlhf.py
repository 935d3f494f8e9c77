"""OpenRLHF's functions as its formulas define them."""

import pytest
import torch
import torch.nn.functional as F

from hybridengine.integrations import openrlhf

B, L, V = 3, 6, 17


@pytest.fixture
def batch():
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0]]).float()
    old = torch.randn(B, L) - 2
    return {
        "mask": mask,
        "old": old,
        "log_probs": (old + torch.randn(B, L) * 0.4).requires_grad_(),
        "rollout": old + torch.randn(B, L) * 0.5,
        "advantages": torch.randn(B, L),
    }


def test_log_probs_and_entropy():
    torch.manual_seed(0)
    logits = torch.randn(B, L, V, requires_grad=True)
    before, labels = logits.detach().clone(), torch.randint(0, V, (B, L))
    log_p = (logits / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, labels[..., None]).squeeze(-1)
    torch.testing.assert_close(openrlhf.log_probs_from_logits(logits, labels, 0.7), expected)
    log_p = logits.log_softmax(-1)
    entropy = openrlhf.compute_entropy(logits)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1))
    (grad,) = torch.autograd.grad(entropy.sum(), logits)
    (exact,) = torch.autograd.grad(-(log_p.exp() * log_p).sum(), logits)
    torch.testing.assert_close(grad, exact)
    assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize("masked", [True, False])
def test_advantages_and_returns(batch, masked):
    torch.manual_seed(1)
    values, rewards = torch.randn(B, L), torch.randn(B, L)
    mask = batch["mask"] if masked else None
    v, r = (x * mask if masked else x for x in (values, rewards))
    advantages, last = [], torch.zeros(B)
    for t in reversed(range(L)):  # masked tokens are steps with value and reward 0
        following = v[:, t + 1] if t + 1 < L else 0.0
        last = r[:, t] + 0.9 * following - v[:, t] + 0.9 * 0.8 * last
        advantages.append(last)
    expected = torch.stack(advantages[::-1], 1)
    given = openrlhf.get_advantages_and_returns(None, values, rewards, mask, 0.9, 0.8)
    torch.testing.assert_close(given[0], expected)
    torch.testing.assert_close(given[1], expected + v)
    powers = torch.tensor([[0.9 ** (j - i) if j >= i else 0.0 for j in range(L)] for i in range(L)])
    returns = openrlhf.get_cumulative_returns(None, rewards, mask, 0.9)
    torch.testing.assert_close(returns, r @ powers.t())


def test_balance():
    partitions = openrlhf.get_seqlen_balanced_partitions([8, 7, 6, 5], 2, equal_size=True)
    assert sorted(map(sorted, partitions)) == [[0, 3], [1, 2]]
    with pytest.raises(AssertionError, match="does not fit"):
        openrlhf.get_seqlen_balanced_partitions([8, 7, 6], 2, equal_size=True)
    assert openrlhf.get_minimum_num_micro_batch_size([5, 3, 7, 2, 3], 5, 2, 1) == 2
    assert openrlhf.get_minimum_num_micro_batch_size([50, 3, 7], 5, 2, 1) == 2


def _surrogate(batch, ratio, dual_clip=None):
    first = ratio * batch["advantages"]
    clipped = ratio.clamp(0.8, 1.2) * batch["advantages"]
    lower = torch.min(first, clipped)
    if dual_clip is not None:
        bounded = torch.max(lower, dual_clip * batch["advantages"])
        lower = torch.where(batch["advantages"] < 0, bounded, lower)
    return -lower, (clipped < first).float()


@pytest.mark.parametrize("dual_clip", [None, 1.1])
@pytest.mark.parametrize("total", [None, 24.0])
def test_ppo(batch, dual_clip, total):
    mask, log_probs = batch["mask"], batch["log_probs"]
    losses, clipped = _surrogate(batch, (log_probs - batch["old"]).exp(), dual_clip)
    expected = (losses * mask).sum() / (mask.sum() if total is None else total / 2)
    module = openrlhf.PolicyLoss(dual_clip=dual_clip)
    loss, share, kl, *nothing = module(
        log_probs, batch["old"], batch["advantages"], mask, dp_size=2, batch_num_tokens=total
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(share, (clipped * mask).sum() / mask.sum())
    torch.testing.assert_close(kl, ((batch["old"] - log_probs) * mask).detach().sum() / mask.sum())
    assert nothing == [None, None]
    for actual, exact in zip(
        torch.autograd.grad(loss, log_probs), torch.autograd.grad(expected, log_probs), strict=True
    ):
        torch.testing.assert_close(actual, exact)


@pytest.mark.parametrize("corrected", [False, True])
def test_gspo_has_the_gradient_of_the_sequence_ratio(batch, corrected):
    mask, log_probs = batch["mask"], batch["log_probs"]
    base = batch["rollout"] if corrected else batch["old"]
    lengths = mask.sum(-1, keepdim=True)
    ratio = (((log_probs - base) * mask).sum(-1, keepdim=True) / lengths).exp()
    losses, _ = _surrogate(batch, ratio.expand(B, L))
    expected = ((losses * mask).sum(-1) / lengths.squeeze(-1)).mean()
    level = "token" if corrected else "off"
    module = openrlhf.PolicyLoss(policy_loss_type="gspo", is_correction_level=level)
    loss, *_ = module(log_probs, batch["old"], batch["advantages"], mask, batch["rollout"])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, log_probs)[0], torch.autograd.grad(expected, log_probs)[0]
    )


def test_correction_by_clamped_ratios(batch):
    mask, log_probs = batch["mask"], batch["log_probs"]
    losses, _ = _surrogate(batch, (log_probs - batch["old"]).exp())
    weights = (batch["old"] - batch["rollout"]).exp()
    expected = (losses * weights.clamp(0.8, 1.25) * mask).sum() / mask.sum()
    outside = ((weights < 0.8) | (weights > 1.25)).float()
    module = openrlhf.PolicyLoss(
        is_correction_level="token", is_correction_mode="clip", is_correction_threshold=(0.8, 1.25)
    )
    loss, _, _, kl, share = module(
        log_probs, batch["old"], batch["advantages"], mask, batch["rollout"]
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(share, (outside * mask).sum() / mask.sum())
    torch.testing.assert_close(kl, ((batch["rollout"] - batch["old"]) * mask).sum() / mask.sum())


@pytest.mark.parametrize("by_tokens", [True, False])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(batch, by_tokens, clip):
    torch.manual_seed(1)
    values, old, returns, mask = *(torch.randn(B, L) for _ in range(3)), batch["mask"]
    errors = (values - returns) ** 2
    if clip is not None:
        clipped = old + (values - old).clamp(-clip, clip)
        errors = torch.max(errors, (clipped - returns) ** 2)
    expected = (errors * mask).sum() / mask.sum()
    if not by_tokens:
        expected = ((errors * mask).sum(-1) / mask.sum(-1)).mean()
    loss = openrlhf.ValueLoss(clip, by_tokens)(values, old, returns, mask)
    torch.testing.assert_close(loss, 0.5 * expected)


def test_gpt_lm_loss():
    torch.manual_seed(0)
    logits = torch.randn(B, L, V, requires_grad=True)
    labels = torch.randint(0, V, (B, L))
    labels[0, 3:] = -100
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss = openrlhf.GPTLMLoss()(logits, labels)
    torch.testing.assert_close(loss, expected)
    (grad,), (exact,) = (torch.autograd.grad(x, logits) for x in (loss, expected))
    torch.testing.assert_close(grad, exact)


def test_wrong_corrections_are_refused():
    with pytest.raises(ValueError, match="is_correction_level must be off/token/seq"):
        openrlhf.PolicyLoss(is_correction_level="geo")
    with pytest.raises(ValueError, match="Invalid policy loss type"):
        openrlhf.PolicyLoss(policy_loss_type="dpo")
