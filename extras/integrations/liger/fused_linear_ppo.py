"""Liger's GRPO from hidden states: liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss.

Liger computes one sequence at a time and each in blocks of the vocabulary; here all tokens of the
batch go through `linear_token_log_probs` in chunks that fit its memory budget, and masked tokens
are left out. `chunk_size` and `compiled` are accepted and change nothing.
"""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from .grpo_loss import GRPOOptions, check_positive, grpo_terms, masked_mean, reduce_grpo_loss
from .head import IGNORE_INDEX, GradientsInForward, detached, head_log_probs, loss_and_gradients


class LigerFusedLinearPPOBase(GradientsInForward):
    """A loss on log-probs [B, L], computed from hidden states, with gradients in the forward.

    A subclass defines `ppo_loss_fn`, and a `forward` that calls this one with `cls` and `ctx`.
    """

    num_targets = 3

    @staticmethod
    def ppo_loss_fn(*args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
        """Return (loss, metrics) of log-probs [B, L]."""
        raise NotImplementedError("PPO loss function must be implemented.")

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        cls,
        ctx,
        _input,
        weight,
        selected_token_ids,
        attention_mask,
        advantages,
        bias=None,
        ref_per_token_logps=None,
        old_per_token_logps=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.04,
        loss_type="dapo",
        max_completion_length=None,
        importance_sampling_level="token",
        temperature=1.0,
        compiled=True,
        use_ref_model=False,
        chunk_size=1,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vllm_is_ratio=None,
        delta=None,
        use_bias_correction_kl=False,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        num_items_in_batch=None,
    ):
        """Compute (loss, metrics); arguments as in `LigerFusedLinearGRPOFunction`."""
        names = {field.name for field in fields(GRPOOptions)}
        options = {name: value for name, value in locals().items() if name in names}
        _check_reference(use_ref_model, ref_per_token_logps, ref_input)
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise ValueError("loss_type 'dr_grpo' needs max_completion_length.")
        ratio = _check_ratio(vllm_is_ratio, attention_mask.shape)
        token_ids, old, ref = selected_token_ids, old_per_token_logps, ref_per_token_logps
        if not use_ref_model:
            ref = None
        if _ignores_masked_tokens(cls, loss_type):
            # What masked tokens hold must not overflow: a ratio of inf times 0 is NaN.
            keep = attention_mask != 0
            token_ids = torch.where(keep, token_ids, IGNORE_INDEX)
            old, ref = (None if t is None else torch.where(keep, t, 0.0) for t in (old, ref))
        if use_ref_model and ref is None:
            ref = cls.chunk_forward(ref_input, ref_weight, token_ids, ref_bias, temperature)

        def compute(_input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
            return cls.ppo_loss_fn(
                per_token_logps=cls.chunk_forward(_input, weight, token_ids, bias, temperature),
                attention_mask=attention_mask,
                advantages=advantages,
                full_attention_mask=attention_mask,
                ref_per_token_logps=None if ref is None else ref.float(),
                old_per_token_logps=None if old is None else old.float(),
                max_completion_length=max_completion_length,
                vllm_is_ratio=ratio,
                num_items_in_batch=num_items_in_batch,
                **options,
            )

        loss, metrics, grads = loss_and_gradients(compute, (_input, weight, bias))
        ctx.save_for_backward(*grads)
        return loss, detached(metrics)

    @staticmethod
    def chunk_forward(input_chunk, weight, selected_token_ids, bias=None, temperature=1.0):  # type: ignore[no-untyped-def]
        """Compute the log-probs [B, L] of tokens from hidden states [B, L, H]."""
        return head_log_probs(
            input_chunk, weight, selected_token_ids, bias, temperature=temperature
        )[0]


def _ignores_masked_tokens(cls: type, loss_type: str) -> bool:
    """Tell whether results do not depend on masked tokens; unknown losses may read them."""
    known = cls.ppo_loss_fn.__qualname__ == "LigerFusedLinearGRPOFunction.ppo_loss_fn"  # type: ignore[attr-defined]
    return known and loss_type != "luspo"


def _check_reference(use_ref_model: bool, log_probs: Tensor | None, hidden: Tensor | None) -> None:
    if use_ref_model and log_probs is None and hidden is None:
        raise ValueError("use_ref_model needs ref_per_token_logps or ref_input; give one of them.")
    if use_ref_model and log_probs is not None and hidden is not None:
        warnings.warn(
            "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.",
            stacklevel=4,
        )


def _check_ratio(ratio: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Return vllm_is_ratio as [B, 1] or [B, L]."""
    if ratio is None:
        return None
    batch, length = shape
    if tuple(ratio.shape) not in ((batch,), (batch, 1), (batch, length)):
        raise ValueError(
            f"vllm_is_ratio has shape {list(ratio.shape)}; expected [{batch}], [{batch}, 1] or "
            f"[{batch}, {length}]."
        )
    return ratio.unsqueeze(-1) if ratio.dim() == 1 else ratio


# The arguments of `LigerFusedLinearGRPOFunction.apply`, in Liger's order.
_ARGUMENTS = (
    *("_input", "weight", "selected_token_ids", "attention_mask", "advantages", "bias"),
    *("ref_per_token_logps", "old_per_token_logps", "ref_input", "ref_weight", "ref_bias"),
    *("beta", "epsilon_low", "epsilon_high", "loss_type", "max_completion_length"),
    *("importance_sampling_level", "sapo_temperature_pos", "sapo_temperature_neg"),
    *("temperature", "compiled", "use_ref_model", "chunk_size", "vllm_is_ratio", "delta"),
    *("use_bias_correction_kl", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
    *("vespo_lambda_neg", "num_items_in_batch"),
)


class LigerFusedLinearGRPOFunction(LigerFusedLinearPPOBase):
    """GRPO and its relatives from hidden states; see `LigerFusedLinearGRPOLoss`."""

    @staticmethod
    def ppo_loss_fn(  # type: ignore[no-untyped-def]
        per_token_logps,
        attention_mask,
        advantages,
        full_attention_mask,
        ref_per_token_logps=None,
        old_per_token_logps=None,
        loss_type="dapo",
        max_completion_length=None,
        vllm_is_ratio=None,
        num_items_in_batch=None,
        **options,
    ):
        """Return (loss, [mean KL if beta is not 0, share of clipped tokens]).

        All sequences are given at once: attention_mask is full_attention_mask.
        options: the other fields of `GRPOOptions`.
        """
        terms = grpo_terms(
            per_token_logps,
            attention_mask,
            advantages,
            old_per_token_logps,
            ref_per_token_logps,
            vllm_is_ratio,
            GRPOOptions(loss_type=loss_type, **options),
        )
        loss = reduce_grpo_loss(
            terms.loss, attention_mask, loss_type, max_completion_length, num_items_in_batch
        )
        metrics = [] if terms.kl is None else [masked_mean(terms.kl, attention_mask)]
        return loss, [*metrics, masked_mean(terms.is_clipped, attention_mask)]

    @classmethod
    def forward(cls, ctx, *args):  # type: ignore[no-untyped-def]
        """Compute (loss, metrics) of arguments in the order of `_ARGUMENTS`.

        Args:
            _input: hidden states [B, L, H]; weight: [V, H]; bias: [V].
            selected_token_ids, attention_mask: [B, L]; advantages: [B].
            ref_per_token_logps, old_per_token_logps: [B, L]; without old ones every ratio is 1.
            ref_input, ref_weight, ref_bias: of the reference model, used for its log-probs if
                use_ref_model is set and they are not given.
            vllm_is_ratio: [B], [B, 1] or [B, L], importance weights of the rollout.
            num_items_in_batch: completion tokens of all ranks and micro-batches, for dapo, cispo
                and vespo.
        """
        if len(args) > len(_ARGUMENTS):
            raise TypeError(f"got {len(args)} arguments; expected at most {len(_ARGUMENTS)}")
        given = {"use_ref_model": True} | dict(zip(_ARGUMENTS, args, strict=False))
        # Wrong combinations raise before anything is computed.
        GRPOOptions.of(given)
        return super().forward(cls, ctx, **given)


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """GRPO loss from hidden states, without [B, L, V] logits.

    Args:
        loss_type: grpo, bnpo, dr_grpo (with max_completion_length), dapo, cispo, sapo, luspo or
            vespo.
        importance_sampling_level: "token" or "sequence" (GSPO).
        delta: upper bound of the unclipped ratio (two-sided clipping).
        use_bias_correction_kl: multiply the KL by the ratio.
        beta, epsilon_low, epsilon_high, temperature, sapo_*, vespo_*: of the formulas.
        use_ref_model: whether the KL is to a reference model.
        compiled, chunk_size: without effect.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__()
        check_positive(
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            delta=delta,
        )
        for name, value in options.items():
            setattr(self, name, value)

    def forward(  # type: ignore[no-untyped-def]
        self,
        _input,
        lin_weight,
        selected_token_ids,
        attention_mask,
        advantages,
        bias=None,
        ref_per_token_logps=None,
        old_per_token_logps=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        vllm_is_ratio=None,
        num_items_in_batch=None,
    ):
        """Compute (loss, metrics); see `LigerFusedLinearGRPOFunction.forward`."""
        given = locals() | {"weight": lin_weight}
        return LigerFusedLinearGRPOFunction.apply(
            *(given[name] if name in given else getattr(self, name) for name in _ARGUMENTS)
        )
