"""Liger's GRPO losses on our operators against plain PyTorch, written out, in float64."""

import warnings

import pytest
import torch

from hybridengine.integrations import liger
from hybridengine.integrations.liger.grpo_loss import GRPOOptions, grpo_terms

B, L, H, V = 3, 6, 8, 19


@pytest.fixture
def batch():
    torch.manual_seed(0)
    mask = torch.ones(B, L)
    mask[0, 4:] = 0
    mask[2, 1:] = 0
    return {
        "hidden": torch.randn(B, L, H),
        "weight": torch.randn(V, H),
        "bias": torch.randn(V),
        "ids": torch.randint(0, V, (B, L)),
        "mask": mask,
        "advantages": torch.tensor([1.3, -0.7, 0.4]),
        "shift": torch.randn(B, L) * 0.4,
    }


def _log_probs(batch, temperature):
    logits = batch["hidden"] @ batch["weight"].t() + batch["bias"]
    return (logits / temperature).log_softmax(-1).gather(-1, batch["ids"][..., None]).squeeze(-1)


def _expected(batch, level, beta, delta, ratio):
    """The dapo loss of float64 leaves: (loss, gradients of hidden, weight and bias)."""
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    leaves = [batch[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    log_probs, mask = _log_probs(batch, 0.7), batch["mask"]
    x = batch["shift"] + log_probs - log_probs.detach()
    if level == "sequence":
        x = (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    advantages = batch["advantages"][:, None]
    first = x.exp() if delta is None else x.exp().clamp(max=delta)
    losses = -torch.min(first * advantages, x.exp().clamp(0.8, 1.3) * advantages)
    losses = losses * ratio.double()[:, None]
    if beta:
        d = 0.5 * batch["shift"] + log_probs.detach() - log_probs
        losses = losses + beta * (d.exp() - d - 1) * x.exp()
    loss = (losses * mask).sum() / mask.sum()
    return loss, torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("delta", [None, 1.1])
@pytest.mark.parametrize("level, beta", [("token", 0.0), ("token", 0.1), ("sequence", 0.1)])
def test_from_hidden_states(batch, level, beta, delta):
    ratio = torch.tensor([0.5, 1.0, 1.5])
    loss_exact, grads_exact = _expected(batch, level, beta, delta, ratio)
    log_probs = _log_probs(batch, 0.7)
    leaves = [batch[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]
    module = liger.LigerFusedLinearGRPOLoss(
        beta=beta,
        epsilon_high=0.3,
        temperature=0.7,
        importance_sampling_level=level,
        delta=delta,
        use_bias_correction_kl=True,
    )
    hidden, weight, bias = leaves
    loss, metrics = module(
        hidden,
        weight,
        batch["ids"],
        batch["mask"],
        batch["advantages"],
        bias,
        ref_per_token_logps=log_probs + 0.5 * batch["shift"],
        old_per_token_logps=log_probs - batch["shift"],
        vllm_is_ratio=ratio,
    )
    assert len(metrics) == (2 if beta else 1)
    torch.testing.assert_close(loss.double(), loss_exact.detach(), rtol=1e-5, atol=1e-6)
    (2 * loss).backward()
    for leaf, exact in zip(leaves, grads_exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), 2 * exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("level, beta", [("token", 0.0), ("token", 0.1), ("sequence", 0.1)])
def test_from_logits(batch, level, beta):
    ratio = torch.ones(B)
    loss_exact, (hidden_grad, *_) = _expected(batch, level, beta, None, ratio)
    hidden = batch["hidden"].clone().requires_grad_()
    logits = hidden @ batch["weight"].t() + batch["bias"]
    logits = torch.cat([logits, torch.full((B, 1, V), torch.nan)], 1)  # not used
    log_probs = _log_probs(batch, 0.7)
    old = torch.where(batch["mask"] > 0, log_probs - batch["shift"], -1e4)  # as padding may be
    options = {
        "temperature": 0.7,
        "beta": beta,
        "eps_high": 0.3,
        "importance_sampling_level": level,
        "use_bias_correction_kl": True,
    }
    ref = log_probs + 0.5 * batch["shift"]
    given = (old, ref, batch["ids"], batch["advantages"], batch["mask"])
    loss, metrics = liger.triton_grpo_loss(logits, *given, reduce=True, **options)
    torch.testing.assert_close(loss.double(), loss_exact.detach(), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        losses, kl, clipped = liger.triton_grpo_loss(logits, *given, **options)
    assert losses.shape == clipped.shape == (B, L) and not losses[batch["mask"] == 0].any()
    assert (kl is None) == (beta == 0)
    torch.testing.assert_close(losses.sum() / batch["mask"].sum(), loss.detach())
    torch.testing.assert_close(clipped.sum() / batch["mask"].sum(), metrics[-1])
    loss.backward()
    torch.testing.assert_close(hidden.grad.double(), hidden_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "loss_type, value",
    [
        ("grpo", (1.0 + 1.0 / 2 + 3.0) / 3),
        ("bnpo", 5.0 / 4),
        ("dr_grpo", 5.0 / (3 * 2)),
        ("dapo", 5.0 / 4),
        ("luspo", (1.0 * 1 + 1.0 * 2 + 3.0 * 1) / 6),
    ],
)
def test_reductions(loss_type, value):
    losses = torch.tensor([[1.0, 0.0], [2.0, -1.0], [3.0, 0.0]])
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    from hybridengine.integrations.liger.grpo_loss import reduce_grpo_loss

    loss = reduce_grpo_loss(losses, mask, loss_type, 2, None)
    assert loss.item() == pytest.approx(value)


def test_num_items_in_batch_is_the_divisor(batch):
    module = liger.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
    given = (batch["hidden"], batch["weight"], batch["ids"], batch["mask"], batch["advantages"])
    loss, _ = module(*given)
    half, _ = module(*given, num_items_in_batch=2 * batch["mask"].sum())
    torch.testing.assert_close(half, loss / 2)


def test_soft_and_weighted_losses_have_their_gradients():
    """At ratio 1: SAPO's gate has slope 1, CISPO's bound and VESPO's weight are 1."""
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    mask, advantages = torch.ones(2, 3), torch.tensor([2.0, -3.0])
    for loss_type in ("sapo", "cispo", "vespo"):
        options = GRPOOptions(beta=0.0, loss_type=loss_type, epsilon_high=5.0)
        terms = grpo_terms(log_probs, mask, advantages, None, None, None, options)
        (grad,) = torch.autograd.grad(terms.loss.sum(), log_probs)
        torch.testing.assert_close(grad, -advantages[:, None].expand(2, 3))
        assert not terms.is_clipped.any()


def test_gamma_weights():
    # w = 2 for a positive advantage: e^3 2^2 e^(-6)
    weights = liger.get_gamma_weights(
        torch.tensor([1.0]), torch.tensor([[2.0, 7.0]]).log(), torch.tensor([[1.0, 0.0]])
    )
    assert weights.item() == pytest.approx(4 * torch.tensor(-3.0).exp().item())


def test_a_frozen_head_gets_no_gradient(batch):
    hidden = batch["hidden"].clone().requires_grad_()
    module = liger.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
    loss, _ = module(hidden, batch["weight"], batch["ids"], batch["mask"], batch["advantages"])
    loss.backward()
    assert hidden.grad.any() and batch["weight"].grad is None


def test_weight_of_another_dtype_and_autocast(batch):
    module = liger.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
    rest = (batch["ids"], batch["mask"], batch["advantages"])
    weight = batch["weight"].requires_grad_()
    loss, _ = module(batch["hidden"].bfloat16(), weight, *rest)
    loss.backward()
    assert weight.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = module(batch["hidden"], weight, *rest)
    torch.testing.assert_close(cast, loss)


def test_what_is_refused(batch):
    with pytest.raises(ValueError, match="Sequence-level"):
        GRPOOptions(loss_type="sapo", importance_sampling_level="sequence")
    with pytest.raises(ValueError, match="Unknown loss_type"):
        GRPOOptions(loss_type="ppo")
    with pytest.raises(ValueError, match="sapo_temperature_pos must be positive"):
        liger.LigerFusedLinearGRPOLoss(sapo_temperature_pos=0.0)
    given = (batch["hidden"], batch["weight"], batch["ids"], batch["mask"], batch["advantages"])
    with pytest.raises(ValueError, match="ref_per_token_logps or ref_input"):
        liger.LigerFusedLinearGRPOLoss()(*given)
    with pytest.raises(ValueError, match="max_completion_length"):
        liger.LigerFusedLinearGRPOLoss(loss_type="dr_grpo", use_ref_model=False)(*given)
    with pytest.raises(ValueError, match=r"vllm_is_ratio has shape \[2\]"):
        module = liger.LigerFusedLinearGRPOLoss(use_ref_model=False)
        module(*given, vllm_is_ratio=torch.ones(2))
    ref = torch.zeros(B, L)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        liger.LigerFusedLinearGRPOLoss()(
            *given, ref_per_token_logps=ref, ref_input=batch["hidden"], ref_weight=batch["weight"]
        )
    assert "Using ref_per_token_logps" in str(caught[0].message)


def test_fused_selective_log_softmax(batch):
    logits = torch.randn(B, L + 1, V)
    ids = torch.cat([torch.zeros(B, 4, dtype=torch.int64), batch["ids"]], 1)
    log_probs = liger.fused_selective_log_softmax(logits, ids, 0.9, batch["mask"])
    expected = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, batch["ids"][..., None])
    torch.testing.assert_close(log_probs, expected.squeeze(-1) * batch["mask"])


def test_liger_itself_uses_ours_while_patched(batch):
    pytest.importorskip("liger_kernel")
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    from liger_kernel.transformers import grpo_loss as from_logits

    given = (batch["hidden"], batch["weight"], batch["ids"], batch["mask"], batch["advantages"])
    theirs = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=False)
    expected, _ = theirs(*given)
    with liger.patched():
        assert from_logits.triton_grpo_loss is liger.triton_grpo_loss
        hidden = batch["hidden"].clone().requires_grad_()
        loss, _ = theirs(hidden, *given[1:])
        loss.backward()
        assert hidden.grad[batch["mask"] > 0].any()
        assert not hidden.grad[batch["mask"] == 0].any()
    torch.testing.assert_close(loss, expected)
    assert from_logits.triton_grpo_loss is not liger.triton_grpo_loss
