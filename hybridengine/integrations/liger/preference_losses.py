"""Liger's CPO, ORPO, SimPO and KTO from hidden states (liger_kernel.chunked_loss)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused_linear_preference import (
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)


def _smoothed_logsigmoid(logits: Tensor, label_smoothing: float, pairs: int) -> Tensor:
    losses = F.logsigmoid(logits) * (1 - label_smoothing) + F.logsigmoid(-logits) * label_smoothing
    return -losses.sum() / pairs


class LigerFusedLinearCPOFunction(LigerFusedLinearPreferenceBase):
    """CPO, arXiv 2401.08417, from hidden states; see `LigerFusedLinearCPOLoss`."""

    @staticmethod
    def preference_loss_fn(  # type: ignore[no-untyped-def]
        chosen_logps, rejected_logps, full_target, beta=0.1, label_smoothing=0.0
    ):
        """Return (loss, rewards of the chosen, of the rejected)."""
        logits = beta * (chosen_logps - rejected_logps)
        loss = _smoothed_logsigmoid(logits, label_smoothing, full_target.shape[0] // 2)
        return loss, beta * chosen_logps, beta * rejected_logps

    @classmethod
    def forward(  # type: ignore[no-untyped-def]
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ignore_index=-100,
        beta=0.1,
        alpha=1.0,
        label_smoothing=0.0,
        compute_nll_loss=True,
        compiled=True,
        average_log_prob=False,
        chunk_size=1,
    ):
        """Compute (loss, results); see `LigerFusedLinearPreferenceBase.forward`."""
        given = {k: v for k, v in locals().items() if k not in ("cls", "ctx", "__class__")}
        return super().forward(cls, ctx, **given)


class LigerFusedLinearCPOLoss(torch.nn.Module):
    """CPO loss from hidden states; arguments as in `LigerFusedLinearDPOLoss`."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta, self.alpha = ignore_index, beta, alpha
        self.label_smoothing, self.compute_nll_loss = label_smoothing, compute_nll_loss
        self.compiled, self.average_log_prob = compiled, average_log_prob
        self.chunk_size = chunk_size

    def forward(  # type: ignore[no-untyped-def]
        self, lin_weight, _input, target, bias=None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Compute (loss, results); see `LigerFusedLinearPreferenceBase.forward`."""
        return LigerFusedLinearCPOFunction.apply(
            _input,
            lin_weight,
            target,
            bias,
            self.ignore_index,
            self.beta,
            self.alpha,
            self.label_smoothing,
            self.compute_nll_loss,
            self.compiled,
            self.average_log_prob,
            self.chunk_size,
        )


class LigerFusedLinearORPOFunction(LigerFusedLinearPreferenceBase):
    """ORPO, arXiv 2403.07691, from hidden states; see `LigerFusedLinearORPOLoss`."""

    @staticmethod
    def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta=0.1):  # type: ignore[no-untyped-def]
        """Return (loss, rewards of the chosen, of the rejected, mean logsigmoid(odds), mean odds).

        The odds are log-odds ratios.
        """
        pairs = full_target.shape[0] // 2
        log_odds = (chosen_logps - rejected_logps) - (
            torch.log1p(-torch.exp(chosen_logps)) - torch.log1p(-torch.exp(rejected_logps))
        )
        ratio = F.logsigmoid(log_odds).sum() / pairs
        rewards = (beta * chosen_logps, beta * rejected_logps)
        return -beta * ratio, *rewards, ratio, log_odds.sum() / pairs

    @classmethod
    def forward(  # type: ignore[no-untyped-def]
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ignore_index=-100,
        beta=0.1,
        compute_nll_loss=True,
        nll_target=None,
        compiled=True,
        chunk_size=1,
    ):
        """Compute (loss, results); see `LigerFusedLinearPreferenceBase.forward`."""
        given = {k: v for k, v in locals().items() if k not in ("cls", "ctx", "__class__")}
        return super().forward(cls, ctx, **given)


class LigerFusedLinearORPOLoss(torch.nn.Module):
    """ORPO loss from hidden states, with mean log-probs; arguments as in the DPO loss."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta = ignore_index, beta
        self.compute_nll_loss, self.compiled = compute_nll_loss, compiled
        self.chunk_size = chunk_size

    def forward(  # type: ignore[no-untyped-def]
        self, lin_weight, _input, target, bias=None, nll_target=None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Compute (loss, results); see `LigerFusedLinearPreferenceBase.forward`."""
        return LigerFusedLinearORPOFunction.apply(
            _input,
            lin_weight,
            target,
            bias,
            self.ignore_index,
            self.beta,
            self.compute_nll_loss,
            nll_target,
            self.compiled,
            self.chunk_size,
        )


class LigerFusedLinearSimPOFunction(LigerFusedLinearPreferenceBase):
    """SimPO, arXiv 2405.14734, from hidden states; see `LigerFusedLinearSimPOLoss`."""

    @staticmethod
    def preference_loss_fn(  # type: ignore[no-untyped-def]
        chosen_logps, rejected_logps, full_target, beta=0.1, gamma=0.5, label_smoothing=0.0
    ):
        """Return (loss, rewards of the chosen, of the rejected)."""
        logits = beta * (chosen_logps - rejected_logps) - gamma
        loss = _smoothed_logsigmoid(logits, label_smoothing, full_target.shape[0] // 2)
        return loss, beta * chosen_logps, beta * rejected_logps

    @classmethod
    def forward(  # type: ignore[no-untyped-def]
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ignore_index=-100,
        beta=0.1,
        alpha=1.0,
        label_smoothing=0.0,
        compute_nll_loss=False,
        compiled=True,
        gamma=0.5,
        chunk_size=1,
    ):
        """Compute (loss, results); see `LigerFusedLinearPreferenceBase.forward`."""
        given = {k: v for k, v in locals().items() if k not in ("cls", "ctx", "__class__")}
        return super().forward(cls, ctx, **given)


class LigerFusedLinearSimPOLoss(torch.nn.Module):
    """SimPO loss from hidden states; gamma is its margin, the others as in the DPO loss."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta, self.alpha = ignore_index, beta, alpha
        self.label_smoothing, self.compute_nll_loss = label_smoothing, compute_nll_loss
        self.compiled, self.gamma, self.chunk_size = compiled, gamma, chunk_size

    def forward(  # type: ignore[no-untyped-def]
        self, lin_weight, _input, target, bias=None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Compute (loss, results); see `LigerFusedLinearPreferenceBase.forward`."""
        return LigerFusedLinearSimPOFunction.apply(
            _input,
            lin_weight,
            target,
            bias,
            self.ignore_index,
            self.beta,
            self.alpha,
            self.label_smoothing,
            self.compute_nll_loss,
            self.compiled,
            self.gamma,
            self.chunk_size,
        )


class LigerFusedLinearKTOFunction(LigerFusedLinearUnpairedPreferenceBase):
    """KTO, arXiv 2402.01306, from hidden states; see `LigerFusedLinearKTOLoss`."""

    @staticmethod
    def preference_loss_fn(  # type: ignore[no-untyped-def]
        log_prob_chunk,
        preference_labels_chunk,
        full_target,
        ref_log_prob_chunk=None,
        beta=0.1,
        kl=None,
    ):
        """Return (loss, sum of the rewards of the chosen, of the rejected)."""
        log_ratio = log_prob_chunk
        if ref_log_prob_chunk is not None:
            log_ratio = log_prob_chunk - ref_log_prob_chunk
        sign = torch.where(preference_labels_chunk, 1, -1)
        margin = log_ratio if kl is None else log_ratio - kl
        losses = 1 - torch.sigmoid(beta * margin * sign)
        rewards = beta * log_ratio
        chosen, rejected = preference_labels_chunk, ~preference_labels_chunk
        loss = losses.sum() / full_target.shape[0]
        return loss, (rewards * chosen).sum(), (rewards * rejected).sum()

    @classmethod
    def forward(  # type: ignore[no-untyped-def]
        cls,
        ctx,
        _input,
        weight,
        target,
        preference_labels,
        bias=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        kl=None,
        ignore_index=-100,
        beta=0.1,
        compiled=True,
        use_ref_model=True,
        average_log_prob=False,
        chunk_size=1,
    ):
        """Compute (loss, results); see `LigerFusedLinearUnpairedPreferenceBase.forward`."""
        given = {k: v for k, v in locals().items() if k not in ("cls", "ctx", "__class__")}
        return super().forward(cls, ctx, **given)


class LigerFusedLinearKTOLoss(torch.nn.Module):
    """KTO loss from hidden states; kl: the KL to the reference model, a number or [N]."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta, self.compiled = ignore_index, beta, compiled
        self.use_ref_model, self.average_log_prob = use_ref_model, average_log_prob
        self.chunk_size = chunk_size

    def forward(  # type: ignore[no-untyped-def]
        self,
        _input,
        lin_weight,
        target,
        bias=None,
        preference_labels=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        kl=None,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Compute (loss, results); see `LigerFusedLinearUnpairedPreferenceBase.forward`."""
        return LigerFusedLinearKTOFunction.apply(
            _input,
            lin_weight,
            target,
            preference_labels,
            bias,
            ref_input,
            ref_weight,
            ref_bias,
            kl,
            self.ignore_index,
            self.beta,
            self.compiled,
            self.use_ref_model,
            self.average_log_prob,
            self.chunk_size,
        )
