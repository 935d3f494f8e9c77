"""value_loss: the clipped squared error of a critic, aggregated as policy_loss is."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _check as check
from ._aggregation import check_aggregation, loss_denominators, token_weights
from ._backend import choose_backend, register_backends
from ._per_token import as_mask, compute_dtype, token_arguments, zero_masked
from .policy_loss.arguments import LossInputs
from .policy_loss.op import run_kernel
from .policy_loss.reference import LossSettings
from .policy_loss.terms import LossOptions

register_backends("value_loss", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference"))


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    response_mask: Tensor | None = None,
    cliprange_value: float | None = 0.5,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    cu_seqlens: Tensor | None = None,
    global_num_tokens: float | Tensor | None = None,
    global_num_seqs: float | Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute sum_t weight_t max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2.

    The clipped value loss of PPO's implementations (arXiv 2005.12729, section 3), in float64 for
    float64 values, else in float32; weights as in policy_loss. The kernels can be differentiated
    once, in reverse mode; the reference any number of times, in both modes.

    Args:
        values: [T], packed tokens, or [B, L], whose rows are the sequences; differentiable.
        old_values, returns: the same shape, constants.
        response_mask: the same shape, bool or 0/1; what masked tokens hold does not matter.
        cliprange_value: c, not negative; None (or infinity) does not clip.
        loss_agg_mode, loss_scale_factor, cu_seqlens, global_num_tokens, global_num_seqs: as in
            policy_loss.
        backend: `cpp`, `cuda`, `triton` or `reference`; None takes the best one. float64 values
            are always computed by the reference.

    Returns:
        (loss, metrics): vf_loss is the loss; vf_clipfrac and vpred_mean are sums divided by the
        global number of tokens. All of them add up over micro-batches and ranks.

    Raises:
        ValueError: as policy_loss.
    """
    op = "value_loss"
    check.not_none(op, values=values, old_values=old_values, returns=returns)
    loss_scale_factor = check_aggregation(op, loss_agg_mode, loss_scale_factor)
    clip = float("inf") if cliprange_value is None else cliprange_value
    clip = check.number(op, "cliprange_value", clip, at_least=0, infinite=True)
    tokens, cu_seqlens = token_arguments(
        op,
        {"values": values, "old_values": old_values, "returns": returns},
        {"response_mask": response_mask},
        cu_seqlens,
    )
    backend = choose_backend(op, values.device, backend, values.dtype)
    counts = (global_num_tokens, global_num_seqs)
    if backend == "reference":
        weighting = (loss_agg_mode, cu_seqlens, counts, loss_scale_factor)
        loss, *means = _reference(tokens, clip, *weighting)
        means = [mean.detach().to(loss.dtype) for mean in means]
    else:
        settings = LossSettings("value", loss_agg_mode, "k1", False, 0.0, 0.0, loss_scale_factor)
        names = {"values": "log_probs", "old_values": "old_log_probs", "returns": "advantages"}
        renamed = {names.get(name, name): tensor for name, tensor in tokens.items()}
        options = LossOptions(clip_ratio_low=clip)
        inputs = LossInputs(renamed, cu_seqlens, None, settings, options, backend)
        loss, sums = run_kernel(op, inputs, counts)
        means = [sums[3], sums[6]]  # pg_clipfrac and ratio_mean of the kernels
    return loss, {"vf_loss": loss.detach(), "vf_clipfrac": means[0], "vpred_mean": means[1]}


def _reference(
    tokens: dict[str, Tensor],
    clip: float,
    loss_agg_mode: str,
    cu_seqlens: Tensor | None,
    counts: tuple[float | Tensor | None, float | Tensor | None],
    loss_scale_factor: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (loss, vf_clipfrac, vpred_mean) in plain PyTorch."""
    mask = as_mask(tokens.get("response_mask"), tokens["values"])
    denominators = loss_denominators("value_loss", loss_agg_mode, mask, cu_seqlens, *counts)
    weights = token_weights(loss_agg_mode, mask, cu_seqlens, denominators, loss_scale_factor)
    dtype, num_tokens = compute_dtype(tokens["values"]), denominators[0]
    values, old, targets = (
        zero_masked(tensor.to(dtype), mask)
        for tensor in (tokens["values"], tokens["old_values"].detach(), tokens["returns"].detach())
    )
    clipped_values = torch.minimum(torch.maximum(values, old - clip), old + clip)
    unclipped_error, clipped_error = ((v - targets).square() for v in (values, clipped_values))
    clipped = clipped_error > unclipped_error
    errors = torch.where(clipped, clipped_error, unclipped_error)
    loss = 0.5 * (weights.to(dtype) * errors).sum()
    return loss, clipped.to(dtype).sum() / num_tokens, values.sum() / num_tokens
