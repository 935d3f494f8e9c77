"""Liger's preference losses on our bases, and its cross-entropy, against PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F
from liger_kernel.chunked_loss import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)

from hybridengine.integrations import liger

N, L, H, V = 4, 5, 8, 13


@pytest.fixture
def batch():
    torch.manual_seed(0)
    target = torch.randint(0, V, (N, L))
    target[0, 3:] = target[3, 0] = -100
    return {
        "hidden": torch.randn(N, L, H) * 0.5,
        "weight": torch.randn(V, H) * 0.5,
        "bias": torch.randn(V),
        "target": target,
        "ref_hidden": torch.randn(N, L, H) * 0.5,
    }


def _leaves(batch, dtype):
    return [
        batch[name].detach().to(dtype).clone().requires_grad_()
        for name in ("hidden", "weight", "bias")
    ]


def _sums(hidden, weight, bias, target, average=False):
    """Log-probs of sequences, those of tokens, and the logits."""
    logits = hidden @ weight.t() + bias
    ids = target.clamp(min=0)[..., None]
    tokens = logits.log_softmax(-1).gather(-1, ids).squeeze(-1) * (target != -100)
    totals = tokens.sum(-1) / ((target != -100).sum(-1) if average else 1)
    return totals, tokens, logits


def _agree(batch, module_loss, exact_loss):
    """Compare losses and gradients, given functions of (hidden, weight, bias)."""
    ours, exact = _leaves(batch, torch.float32), _leaves(batch, torch.float64)
    loss, results = module_loss(*ours)
    expected = exact_loss(*exact)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    (3 * loss).backward()
    expected.backward()
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.grad.double(), 3 * b.grad, rtol=1e-4, atol=1e-6)
    return results


@pytest.fixture
def patched():
    with liger.patched("log_probs"):
        yield


def test_dpo(batch, patched):
    target, ref = batch["target"], batch["ref_hidden"]
    weight = batch["weight"] + 0.1

    def ours(hidden, own_weight, bias):
        module = LigerFusedLinearDPOLoss(
            beta=0.3, compute_nll_loss=True, compiled=False, use_ref_model=True
        )
        return module(own_weight, hidden, target, bias, ref, weight, batch["bias"].detach())

    def exact(hidden, own_weight, bias):
        totals, tokens, _ = _sums(hidden, own_weight, bias, target)
        double = (x.detach().double() for x in (ref, weight, batch["bias"]))
        ratio = totals - _sums(*double, target)[0]
        losses = -F.logsigmoid(0.3 * (ratio[: N // 2] - ratio[N // 2 :]))
        nll = -tokens[: N // 2].sum() / (target[: N // 2] != -100).sum()
        return losses.mean() + nll

    results = _agree(batch, ours, exact)
    totals, _, logits = _sums(*(t.detach() for t in _leaves(batch, torch.float64)), target)
    chosen, rejected, chosen_mean, rejected_mean, nll, *rewards = results
    torch.testing.assert_close(torch.cat([chosen, rejected]).double(), totals)
    torch.testing.assert_close(chosen_mean.double(), logits[: N // 2].mean())
    torch.testing.assert_close(rejected_mean.double(), logits[N // 2 :].mean())
    assert len(rewards) == 2 and not nll.requires_grad


def test_cpo_and_simpo(batch, patched):
    target = batch["target"]

    def exact(average, gamma, with_nll):
        def loss(hidden, weight, bias):
            totals, tokens, _ = _sums(hidden, weight, bias, target, average)
            x = 0.3 * (totals[: N // 2] - totals[N // 2 :]) - gamma
            losses = -0.9 * F.logsigmoid(x) - 0.1 * F.logsigmoid(-x)
            nll = -tokens[: N // 2].sum() / (target[: N // 2] != -100).sum()
            return losses.mean() + (nll if with_nll else 0)

        return loss

    cpo = LigerFusedLinearCPOLoss(compiled=False, beta=0.3, label_smoothing=0.1)
    _agree(batch, lambda h, w, b: cpo(w, h, target, b), exact(False, 0.0, True))
    simpo = LigerFusedLinearSimPOLoss(
        compiled=False, beta=0.3, label_smoothing=0.1, compute_nll_loss=False, gamma=0.7
    )
    _agree(batch, lambda h, w, b: simpo(w, h, target, b), exact(True, 0.7, False))


def test_orpo_with_targets_of_its_own_for_the_nll(batch, patched):
    target, other = batch["target"], torch.randint(0, V, (N, L))

    def exact(hidden, weight, bias):
        totals, _, logits = _sums(hidden, weight, bias, target, True)
        odds = totals - torch.log1p(-totals.exp())
        ratio = F.logsigmoid(odds[: N // 2] - odds[N // 2 :]).mean()
        nll = F.cross_entropy(logits[: N // 2].flatten(0, 1), other[: N // 2].flatten())
        return nll - 0.3 * ratio

    module = LigerFusedLinearORPOLoss(compiled=False, beta=0.3)
    results = _agree(batch, lambda h, w, b: module(w, h, target, b, nll_target=other), exact)
    assert len(results) == 9


def test_kto(batch, patched):
    target, labels = batch["target"], torch.tensor([True, False, False, True])
    kl = torch.tensor([0.1, 0.2, 0.3, 0.4])

    def ours(hidden, weight, bias):
        module = LigerFusedLinearKTOLoss(compiled=False, beta=0.3, use_ref_model=True)
        ref = (batch["ref_hidden"], batch["weight"].detach(), batch["bias"].detach())
        return module(hidden, weight, target, bias, labels, *ref, kl)

    def exact(hidden, weight, bias):
        ref = (batch[name].detach().double() for name in ("ref_hidden", "weight", "bias"))
        ratio = _sums(hidden, weight, bias, target)[0] - _sums(*ref, target)[0]
        sign = torch.where(labels, 1, -1)
        return (1 - torch.sigmoid(0.3 * (ratio - kl.double()) * sign)).mean()

    chosen, rejected, chosen_logits, rejected_logits, *rewards = _agree(batch, ours, exact)
    totals, _, logits = _sums(*(t.detach() for t in _leaves(batch, torch.float64)), target)
    torch.testing.assert_close(chosen.double(), totals[labels].sum())
    torch.testing.assert_close(rejected.double(), totals[~labels].sum())
    torch.testing.assert_close(chosen_logits.double(), logits[labels].sum())
    torch.testing.assert_close(rejected_logits.double(), logits[~labels].sum())
    assert len(rewards) == 2


_CE_OPTIONS = [
    {},
    {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 5.0, "reduction": "sum"},
    {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 5.0, "ce_weight": True},
    {"use_token_scaling": True, "reduction": "none"},
]


def _exact_cross_entropy(hidden, weight, bias, target, options):
    options = {"label_smoothing": 0.0, "lse_square_scale": 0.0, "reduction": "mean"} | options
    z = hidden.flatten(0, 1) @ weight.t() + bias
    if options.get("softcap"):
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    target, valid = target.flatten(), target.flatten() != -100
    class_weight = _class_weights().double() if options.get("ce_weight") else None
    losses = F.cross_entropy(
        z, target, class_weight, reduction="none", label_smoothing=options["label_smoothing"]
    )
    z_losses = options["lse_square_scale"] * z.logsumexp(-1).square() * valid
    if options.get("use_token_scaling"):
        p = z.softmax(-1).gather(-1, target.clamp(min=0)[:, None]).squeeze(-1)
        losses = losses * p.detach()
    if options["reduction"] == "mean":
        own = 1 if class_weight is None else class_weight[target.clamp(min=0)]
        losses, z_losses = losses / (own * valid).sum(), z_losses / valid.sum()
    losses = losses + z_losses
    return losses if options["reduction"] == "none" else losses.sum()


def _class_weights():
    return torch.linspace(0.5, 2.0, V)


@pytest.mark.parametrize("options", _CE_OPTIONS)
def test_fused_linear_cross_entropy(batch, options):
    target, given = batch["target"], dict(options)
    if given.pop("ce_weight", False):
        given["ce_weight"] = _class_weights()
    module = liger.LigerFusedLinearCrossEntropyLoss(
        return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True, **given
    )

    def ours(hidden, weight, bias):
        output = module(weight, hidden.flatten(0, 1), target.flatten(), bias)
        return output.loss.sum(), output

    def exact(hidden, weight, bias):
        return _exact_cross_entropy(hidden, weight, bias, target, options).sum()

    output = _agree(batch, ours, exact)
    logits = _sums(*(t.detach() for t in _leaves(batch, torch.float32)), target)[2].flatten(0, 1)
    valid = target.flatten() != -100
    predicted = torch.where(valid, logits.argmax(-1), -1)
    assert torch.equal(output.predicted_tokens, predicted)
    hits = (predicted == target.flatten()) & valid
    accuracy = hits.float() if given.get("reduction") == "none" else hits.sum() / valid.sum()
    torch.testing.assert_close(output.token_accuracy, accuracy)


def test_gradients_for_ligers_autograd_function(batch):
    hidden, weight, bias = _leaves(batch, torch.float32)
    rows, target = hidden.flatten(0, 1).detach(), batch["target"].flatten()
    loss, *nothing, grad_input, grad_weight, grad_bias = liger.fused_linear_cross_entropy_forward(
        rows,
        weight.detach(),
        target,
        bias=bias.detach(),
        reduction="none",
        token_grad_output=torch.arange(20.0),
        compute_gradients=True,
        weight_requires_grad=False,
    )
    assert nothing == [None] * 3 and grad_weight is None and loss.shape == (20,)
    losses = F.cross_entropy(rows.requires_grad_() @ weight.t() + bias, target, reduction="none")
    (losses * torch.arange(20.0)).sum().backward()
    torch.testing.assert_close(grad_input, rows.grad)
    torch.testing.assert_close(grad_bias, bias.grad)
    doubled = liger.fused_linear_cross_entropy_backward(torch.tensor(2.0), grad_input, None, None)
    assert torch.equal(doubled[0], 2 * grad_input) and doubled[1:] == (None, None)
