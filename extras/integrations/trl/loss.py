"""TRL's GRPO loss with its gradient made in the forward, by `linear_policy_loss`.

TRL computes log-probs of the completions, then its loss; the backward computes the logits again.
Here `GRPOTrainer._compute_loss` runs as it is, on log-probs without gradient, and makes TRL's
metrics; the fused head that it calls computes loss and gradients as well, in the same pass over the
logits (6 T H V operations in place of 8). What the loss is was decided before: by the trainer's
arguments and the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from hybridengine.kernels import linear_policy_loss
from hybridengine.kernels.sparse_linear import sparse_linear_policy_loss
from hybridengine.model import KeptIds

WARNED = "_hybridengine_loss_warned"  # attribute of a trainer
_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
_OF_THE_WINDOW = ("dapo", "cispo")  # TRL divides by the tokens of an accumulation window

logger = logging.getLogger(__name__)


class GRPOLoss:
    """The loss of one batch, which the fused head computes; `arguments` of linear_policy_loss."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments, self.is_computed = arguments, False

    def scores(
        self,
        rows: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        kept: KeptIds | None,
        **head: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and log-probs and entropy [N] without gradient, of labelled rows.

        kept: the entries that each label was sampled from; None: the full vocabulary.
        head: its bias, logit_scale and softcap.
        """
        self.is_computed = True
        given, options = (rows, weight, ids), {**head, **self.arguments}
        if kept is None:
            return linear_policy_loss(*given, temperature, **options)[:3]
        entries = kept.entries(weight.shape[0])
        return sparse_linear_policy_loss(*given, *entries, temperature, **options)[:3]


# What the fused heads of the models that are called compute; None: their usual results.
PENDING: ContextVar[GRPOLoss | None] = ContextVar("PENDING", default=None)


def compute_loss(
    self: Any, model: Any, inputs: dict[str, Any], original: Callable[..., Tensor]
) -> Tensor:
    """Return the loss of a batch, as TRL 1.16's `GRPOTrainer._compute_loss`, and log its metrics.

    Evaluation, and options of the loss that are not in `_obstacle`, run TRL's own, with one warning
    that names the reason.
    """
    if not (torch.is_grad_enabled() and self.model.training):
        return original(self, model, inputs)
    obstacle = _obstacle(self)
    if obstacle:
        _warn(self, obstacle)
        return original(self, model, inputs)
    steps = self.current_gradient_accumulation_steps
    factor = 1.0 if self.loss_type in _OF_THE_WINDOW else 1.0 / steps
    request = GRPOLoss(_arguments(self, inputs) | {"grad_scale": factor})
    losses: list[Tensor] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        token = PENDING.set(request)
        try:
            output = model(*args, **kwargs)
        finally:
            PENDING.reset(token)
        losses.append(output.loss)
        return output

    theirs = original(self, call, inputs)
    if not request.is_computed:
        _warn(self, 'the model has no fused head of ours (group "head"), or one that is not linear')
        return theirs
    (loss,) = losses
    return loss * factor


def _obstacle(trainer: Any) -> str | None:
    """Return which part of the trainer's loss ours lacks; None: none."""
    delta = trainer.args.delta
    reasons = {
        f"loss_type={trainer.loss_type!r}": trainer.loss_type not in _AGGREGATIONS,
        f"importance_sampling_level={trainer.importance_sampling_level!r}": (
            trainer.importance_sampling_level != "token"
        ),
        "top_entropy_quantile": trainer.top_entropy_quantile < 1.0,
        "off_policy_mask_threshold": trainer.off_policy_mask_threshold is not None,
        "an entropy bonus": trainer._entropy_bonus_enabled,
        "a load-balancing loss": trainer.aux_loss_enabled,
        f"delta={delta} below 1 + epsilon_high": (
            delta is not None
            and trainer.loss_type not in ("cispo", "sapo")  # they have no delta
            and delta <= 1 + trainer.epsilon_high
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _arguments(trainer: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `linear_policy_loss` for the completion tokens [N] of a batch."""
    kept = inputs["completion_mask"].bool()

    def tokens(name: str) -> Tensor | None:
        value = inputs.get(name)
        if value is None:
            return None
        value = value.unsqueeze(1) if value.dim() == 1 else value
        return value.expand(kept.shape)[kept]

    args, loss_type = trainer.args, trainer.loss_type
    arguments: dict[str, Any] = {
        "old_log_probs": tokens("old_per_token_logps"),
        "advantages": tokens("advantages"),
        "response_mask": tokens("tool_mask"),
        "loss_agg_mode": _AGGREGATIONS[loss_type],
        "cu_seqlens": torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)),
        "global_num_seqs": kept.shape[0],
    }
    low, high = trainer.epsilon_low, trainer.epsilon_high
    if loss_type == "cispo":  # TRL's bound is of the ratio itself
        arguments |= {"loss_mode": "cispo", "clip_ratio_low": None, "clip_ratio_high": high - 1}
    elif loss_type == "sapo":
        taus = {"tau_pos": args.sapo_temperature_pos, "tau_neg": args.sapo_temperature_neg}
        arguments |= {"loss_mode": "sapo", **taus}
    else:
        clips = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": args.delta}
        arguments |= clips
    if loss_type == "dr_grpo":
        arguments["loss_scale_factor"] = trainer.max_completion_length
    if loss_type in _OF_THE_WINDOW:
        steps = trainer.current_gradient_accumulation_steps / args.steps_per_generation
        items = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        arguments["global_num_tokens"] = items * steps
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        arguments["rollout_is_weights"] = tokens("importance_sampling_ratio")
    if trainer.beta != 0.0:
        arguments |= {
            "ref_log_probs": tokens("ref_per_token_logps"),
            "kl_coef": trainer.beta,
            "kl_times_ratio": args.use_bias_correction_kl,
            "kl_input_clamp": None,
            "kl_output_clamp": None,
        }
    return arguments


def _warn(trainer: Any, reason: str) -> None:
    if not getattr(trainer, WARNED, False):
        setattr(trainer, WARNED, True)
        logger.warning("the loss of this trainer is computed by TRL's own code: %s", reason)
