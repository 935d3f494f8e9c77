"""verl's loss aggregation, KL penalty and value loss: `verl.trainer.ppo.core_algos`.

Tensors are [B, L]. A micro-batch without unmasked tokens has the loss 0 where verl's is NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hybridengine.kernels import aggregate_loss, token_kl, value_loss
from hybridengine.kernels.policy_loss.terms import KL_ALIASES, KL_TYPES

__all__ = ["agg_loss", "compute_value_loss", "kl_penalty"]


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    """Aggregate per-token losses [B, L]: dp_size sum_t weight_t loss_t, weights as in policy_loss.

    batch_num_tokens, global_batch_size: its sizes; required where dp_size is above 1.
    loss_scale_factor: the divisor of seq-mean-token-sum-norm; None: L.
    """
    sizes = BatchSizes(dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    options = aggregation_arguments(loss_mask, loss_agg_mode, sizes)
    return aggregate_loss(loss_mat, response_mask=loss_mask, **options) * dp_size


class BatchSizes(NamedTuple):
    """What verl divides losses by: `global_batch_info` of its configuration."""

    dp_size: int = 1
    batch_num_tokens: int | None = None
    global_batch_size: int | None = None
    loss_scale_factor: float | None = None


def aggregation_arguments(
    loss_mask: Tensor, loss_agg_mode: str, sizes: BatchSizes
) -> dict[str, Any]:
    """Translate verl's denominators into the keyword arguments of our losses."""
    dp_size, num_tokens, num_seqs, factor = sizes
    if dp_size > 1 and loss_agg_mode == "token-mean" and num_tokens is None:
        raise ValueError("(global) batch_num_tokens is required when dp_size > 1")
    if dp_size > 1 and loss_agg_mode.startswith("seq") and num_seqs is None:
        raise ValueError("global_batch_size is required when dp_size > 1")
    return {
        "loss_agg_mode": loss_agg_mode,
        "loss_scale_factor": loss_mask.shape[-1] if factor is None else factor,
        "global_num_tokens": num_tokens,
        "global_num_seqs": num_seqs,
    }


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimate the KL per token: kl (k1), abs, mse (k2), low_var_kl (k3); +: with k2's gradient."""
    if kl_penalty.removesuffix("+") not in (*KL_TYPES, *KL_ALIASES):
        raise NotImplementedError(f"kl_penalty {kl_penalty!r}; expected one of {KL_TYPES}")
    return token_kl(kl_penalty, logprob, ref_logprob)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (clipped value loss, fraction of the unmasked tokens that are clipped)."""
    sizes = BatchSizes(dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    aggregation = aggregation_arguments(response_mask, loss_agg_mode, sizes)
    options: dict[str, Any] = {
        "response_mask": response_mask,
        "cliprange_value": cliprange_value,
    }
    loss, metrics = value_loss(vpreds, values, returns, **options, **aggregation)
    clipped = local_mean(metrics["vf_clipfrac"], response_mask, batch_num_tokens)
    return loss * dp_size, clipped


def local_mean(mean: Tensor, mask: Tensor, num_tokens: float | Tensor | None) -> Tensor:
    """Convert a sum over `num_tokens`, None for those of this call, into the mean of this call."""
    if num_tokens is None:
        return mean
    return mean * max(num_tokens, 1) / mask.sum().clamp(min=1)
