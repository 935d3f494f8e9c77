"""Liger's fused linear cross-entropy: from hidden states, without logits.

`linear_cross_entropy` computes most of it in one pass. Class weights need the logits, a chunk of
rows at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybridengine.kernels import linear_cross_entropy, linear_token_log_probs

from .head import head_operands, loss_and_gradients

_CHUNK_ROWS = 512


@dataclass
class CrossEntropyOutput:
    """The loss, and what else was asked for."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


@dataclass(frozen=True)
class _Options:
    """The options of the loss, under Liger's names."""

    ce_weight: Tensor | None
    ignore_index: int
    lse_square_scale: float
    label_smoothing: float
    reduction: str
    softcap: float | None
    use_token_scaling: bool

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Options:
        """Return the options, which are among `given`."""
        return cls(**{field.name: given[field.name] for field in fields(cls)})


def _losses(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor]:
    """Compute (loss, z-loss), reduced; the loss contains the z-loss."""
    hidden, weight, bias = head_operands(hidden, weight, bias)
    one_pass = options.ce_weight is None and not options.use_token_scaling
    of_head: Any = {"bias": bias, "softcap": options.softcap, "ignore_index": options.ignore_index}
    if options.ce_weight is None:
        losses, z_losses = linear_cross_entropy(
            hidden,
            weight,
            target,
            label_smoothing=options.label_smoothing,
            lse_square_scale=options.lse_square_scale,
            reduction=options.reduction if one_pass else "none",
            **of_head,
        )
        if one_pass:
            return losses, z_losses
        divisor = _count(target, options)
        losses, z_losses = losses / divisor, z_losses / divisor
    else:
        losses, z_losses = _weighted_losses(hidden, weight, target, bias, options)
    if options.use_token_scaling:
        with torch.no_grad():
            log_probs, _ = linear_token_log_probs(hidden, weight, target, **of_head)
        losses, z_losses = losses * log_probs.exp(), z_losses * log_probs.exp()
    if options.reduction == "none":
        return losses, z_losses
    return losses.sum(), z_losses.sum()


def _count(target: Tensor, options: _Options) -> Tensor | int:
    return (target != options.ignore_index).sum() if options.reduction == "mean" else 1


def _weighted_losses(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor]:
    """Compute losses and z-losses [T] with class weights, divided for a mean; Liger's rules.

    The divisor of the z-loss is the number of targets, that of the rest the sum of their weights.
    """
    assert options.ce_weight is not None
    parts = [
        checkpoint(_weighted_rows, *rows, weight, bias, options, use_reentrant=False)
        for rows in zip(hidden.split(_CHUNK_ROWS), target.split(_CHUNK_ROWS), strict=True)
    ]
    losses, lse = (torch.cat(column) for column in zip(*parts, strict=True))
    valid = target != options.ignore_index
    z_losses = torch.where(valid, options.lse_square_scale * lse.square(), 0)
    if options.reduction == "mean":
        weights = options.ce_weight.float()[target[valid]]
        losses, z_losses = losses / weights.sum(), z_losses / valid.sum()
    return losses + z_losses, z_losses.detach()


def _weighted_rows(
    hidden: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor]:
    """Return the losses of rows without the z-loss, 0 where ignored, and lse, from their logits."""
    assert options.ce_weight is not None
    logits = _logits(hidden, weight, bias, options.softcap)
    losses = F.cross_entropy(
        logits,
        target,
        options.ce_weight.float(),
        ignore_index=options.ignore_index,
        reduction="none",
        label_smoothing=options.label_smoothing,
    )
    return losses, logits.logsumexp(-1)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    logits = F.linear(hidden, weight).float()
    if bias is not None:
        logits = logits + bias.float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _predictions(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: _Options,
    want_accuracy: bool,
    want_ids: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the accuracy and the most likely ids [T], -1 where ignored; None if not wanted."""
    if not (want_accuracy or want_ids):
        return None, None
    with torch.no_grad():
        hidden, weight, bias = head_operands(hidden, weight, bias)
        ids = torch.empty_like(target)
        for rows in torch.arange(len(target), device=target.device).split(_CHUNK_ROWS):
            ids[rows] = _logits(hidden[rows], weight, bias, None).argmax(-1)
    valid = target != options.ignore_index
    accuracy = ((ids == target) & valid).float()
    if options.reduction != "none":
        accuracy = accuracy.sum() / valid.sum()
    return (accuracy if want_accuracy else None, torch.where(valid, ids, -1) if want_ids else None)


def fused_linear_cross_entropy_forward(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    ce_weight: Tensor | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    ce_impl: Any = None,
    ce_mode: Any = None,
    token_grad_output: Tensor | None = None,
    compute_gradients: bool | None = None,
    weight_requires_grad: bool | None = None,
    chunk_mem_const: int = 1,
) -> tuple:
    """Compute the cross-entropy and its gradients; what Liger's autograd function calls.

    Args:
        _input: hidden states [T, H]; weight: [V, H]; target: [T]; bias: [V]; ce_weight: [V].
        label_smoothing, lse_square_scale, softcap, ce_weight: settings of the loss.
        use_token_scaling: multiply each loss by the probability of its target, a constant.
        token_grad_output: [T], the gradient of the losses with reduction "none".
        compute_gradients, weight_requires_grad: whether to compute them, where `_input` and
            `weight` do not tell.
        accum_dtype, ce_impl, ce_mode, chunk_mem_const: without effect; sums are float32.

    Returns:
        (loss, z_loss, token_accuracy, predicted_tokens, grad_input, grad_weight, grad_bias), None
        where not asked for; reduced, or [T] with reduction "none".
    """
    options = _Options.of(locals())
    wanted = [t is not None and t.requires_grad for t in (_input, weight, bias)]
    if compute_gradients is not None:
        of_weight = weight.requires_grad if weight_requires_grad is None else weight_requires_grad
        wanted = [compute_gradients, compute_gradients and of_weight, compute_gradients]
    leaves = [
        None if t is None else t.detach().requires_grad_(want)
        for t, want in zip((_input, weight, bias), wanted, strict=True)
    ]

    def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
        loss, z_loss = _losses(hidden, weight, target, bias, options)
        scalar = loss if token_grad_output is None else (loss * token_grad_output).sum()
        return scalar if any(wanted) else loss.detach().sum(), (loss, z_loss)

    _, (loss, z_loss), grads = loss_and_gradients(compute, leaves)
    wants = (return_token_accuracy, return_predicted_tokens)
    accuracy, predicted = _predictions(_input, weight, target, bias, options, *wants)
    if grads[0] is None:  # Liger's function saves a tensor
        grads[0] = _input.new_zeros(()).expand_as(_input)
    return (loss.detach(), z_loss.detach() if return_z_loss else None, accuracy, predicted, *grads)


def fused_linear_cross_entropy_backward(
    grad_output: Tensor, grad_input: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients times that of the loss, a 0-d tensor."""
    grads = (grad_input, grad_weight, grad_bias)
    return tuple(None if grad is None else grad * grad_output for grad in grads)


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    """Compute the cross-entropy of hidden states [T, H]; differentiable.

    Arguments as in `fused_linear_cross_entropy_forward`. Returns the loss, or a CrossEntropyOutput
    if more is asked for.
    """
    options = _Options.of(locals())
    loss, z_loss = _losses(input, weight, target, bias, options)
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens):
        return loss
    wants = (return_token_accuracy, return_predicted_tokens)
    accuracy, predicted = _predictions(input, weight, target, bias, options, *wants)
    return CrossEntropyOutput(loss, z_loss.detach() if return_z_loss else None, accuracy, predicted)


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """The module of `liger_fused_linear_cross_entropy`."""

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__()
        for name, value in options.items():
            setattr(self, name, value)
        self._names = tuple(options)

    def forward(  # type: ignore[no-untyped-def]
        self, lin_weight, _input, target, bias=None
    ) -> Tensor | CrossEntropyOutput:
        """Compute the loss of hidden states [T, H]."""
        options: dict[str, Any] = {name: getattr(self, name) for name in self._names}
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **options)
