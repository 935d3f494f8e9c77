"""Liger's DPO and its variants from hidden states (liger_kernel.chunked_loss)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused_linear_preference import LigerFusedLinearPreferenceBase


@dataclass(frozen=True)
class _Pairs:
    """Log-ratios to the reference model, [B] each, and the options of the variants."""

    chosen: Tensor
    rejected: Tensor
    beta: float
    label_smoothing: float
    tau: float

    @property
    def margin(self) -> Tensor:
        return self.beta * (self.chosen - self.rejected)


def _exo_pair(p: _Pairs) -> Tensor:
    """EXO, arXiv 2402.00856, equation 16."""
    log_chosen, log_rejected = F.logsigmoid(p.margin), F.logsigmoid(-p.margin)
    epsilon = p.label_smoothing
    return log_chosen.exp() * (log_chosen - math.log1p(-epsilon)) + log_rejected.exp() * (
        log_rejected - math.log(epsilon)
    )


def _nca_pair(p: _Pairs) -> Tensor:
    chosen, rejected = p.beta * p.chosen, p.beta * p.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(p: _Pairs) -> Tensor:
    """A share `label_smoothing` of the preferences is flipped."""
    clean = -(1 - p.label_smoothing) * F.logsigmoid(p.margin)
    flipped = -p.label_smoothing * F.logsigmoid(-p.margin)
    return (clean - flipped) / (1 - 2 * p.label_smoothing)


def _discopop(p: _Pairs) -> Tensor:
    """DiscoPOP, arXiv 2406.08414, equation 5."""
    modulation = torch.sigmoid(p.margin / p.tau)
    return -F.logsigmoid(p.margin) * (1 - modulation) + torch.exp(-p.margin) * modulation


# Losses per pair; sppo_hard: arXiv 2405.00675; apo_*: arXiv 2408.06266, equations 7 and 8.
_LOSSES: dict[str, Callable[[_Pairs], Tensor]] = {
    "sigmoid": lambda p: -F.logsigmoid(p.margin),
    "hinge": lambda p: torch.relu(1 - p.margin),
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": lambda p: -F.logsigmoid(p.beta * p.chosen) - F.logsigmoid(-p.beta * p.rejected),
    "sppo_hard": lambda p: (p.chosen - 0.5 / p.beta) ** 2 + (p.rejected + 0.5 / p.beta) ** 2,
    "apo_zero": lambda p: 1 - torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected),
    "apo_down": lambda p: torch.sigmoid(p.beta * p.chosen) + 1 - torch.sigmoid(p.margin),
    "discopop": _discopop,
}


def _check(loss_type: str, label_smoothing: float) -> None:
    if loss_type not in _LOSSES:
        raise ValueError(f"Unsupported loss_type: {loss_type}. Expected: {', '.join(_LOSSES)}.")
    if loss_type == "exo_pair" and label_smoothing <= 0.0:
        raise ValueError("label_smoothing must be > 0 for loss_type='exo_pair', 1e-3 in its paper.")
    if loss_type == "robust" and not 0.0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing must lie in [0.0, 0.5) for loss_type='robust'. Got {label_smoothing}."
        )


class LigerFusedLinearDPOFunction(LigerFusedLinearPreferenceBase):
    """DPO and its variants from hidden states; see `LigerFusedLinearDPOLoss`."""

    @staticmethod
    def preference_loss_fn(  # type: ignore[no-untyped-def]
        chosen_logps,
        rejected_logps,
        full_target,
        ref_chosen_logps=None,
        ref_rejected_logps=None,
        beta=0.1,
        loss_type="sigmoid",
        label_smoothing=0.0,
        discopop_tau=0.05,
    ):
        """Return (loss, rewards of the chosen, of the rejected)."""
        _check(loss_type, label_smoothing)
        chosen = chosen_logps if ref_chosen_logps is None else chosen_logps - ref_chosen_logps
        rejected = rejected_logps
        if ref_rejected_logps is not None:
            rejected = rejected_logps - ref_rejected_logps
        pairs = _Pairs(chosen, rejected, beta, label_smoothing, discopop_tau)
        loss = _LOSSES[loss_type](pairs).sum() / (full_target.shape[0] // 2)
        return loss, beta * chosen, beta * rejected

    @classmethod
    def forward(  # type: ignore[no-untyped-def]
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        ignore_index=-100,
        beta=0.1,
        compute_nll_loss=False,
        compiled=True,
        use_ref_model=True,
        average_log_prob=False,
        chunk_size=1,
        loss_type="sigmoid",
        label_smoothing=0.0,
        discopop_tau=0.05,
        alpha=1.0,
    ):
        """Compute (loss, results); see `LigerFusedLinearPreferenceBase.forward`."""
        given = {k: v for k, v in locals().items() if k not in ("cls", "ctx", "__class__")}
        return super().forward(cls, ctx, **given)


class LigerFusedLinearDPOLoss(torch.nn.Module):
    """DPO loss from hidden states, without [2B, L, V] logits.

    Args:
        ignore_index: of targets.
        beta, loss_type, label_smoothing, discopop_tau: of the loss; loss_type is one of sigmoid,
            hinge, exo_pair, nca_pair, robust, bco_pair, sppo_hard, apo_zero, apo_down, discopop.
        alpha, compute_nll_loss: weight of the NLL of the chosen sequences, and whether to add it.
        use_ref_model: whether ref_input and ref_weight are given.
        average_log_prob: means over targets instead of sums.
        compiled, chunk_size: without effect.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
    ) -> None:
        super().__init__()
        _check(loss_type, label_smoothing)
        self.ignore_index, self.beta, self.alpha = ignore_index, beta, alpha
        self.compute_nll_loss, self.compiled = compute_nll_loss, compiled
        self.use_ref_model, self.average_log_prob = use_ref_model, average_log_prob
        self.chunk_size, self.loss_type = chunk_size, loss_type
        self.label_smoothing, self.discopop_tau = label_smoothing, discopop_tau

    def forward(  # type: ignore[no-untyped-def]
        self, lin_weight, _input, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Compute (loss, results); see `LigerFusedLinearPreferenceBase.forward`."""
        return LigerFusedLinearDPOFunction.apply(
            _input,
            lin_weight,
            target,
            bias,
            ref_input,
            ref_weight,
            ref_bias,
            self.ignore_index,
            self.beta,
            self.compute_nll_loss,
            self.compiled,
            self.use_ref_model,
            self.average_log_prob,
            self.chunk_size,
            self.loss_type,
            self.label_smoothing,
            self.discopop_tau,
            self.alpha,
        )
