"""select_by_covariance: the tokens that the loss modes clip_cov and kl_cov treat apart."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _check as check
from .._per_token import as_mask, compute_dtype, token_arguments, zero_masked
from .terms import SELECTION_MODES


def select_by_covariance(
    log_probs: Tensor,
    advantages: Tensor,
    *,
    loss_mode: str,
    ratio: float = 2e-4,
    response_mask: Tensor | None = None,
    lower: float = 1.0,
    upper: float = 5.0,
    excluded: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Select tokens with a large covariance, for clip_cov and kl_cov (arXiv 2505.22617, eq. 10-13).

    cov_t = (A_t - mean A) (log p_t - mean log p), means over the unmasked. kl_cov takes the
    `ratio` of tokens with the largest cov; clip_cov a random `ratio` of all tokens from those with
    lower < cov < upper; at least one token where there is one. Means and counts are those of this
    call. To make the loss independent of the split into micro-batches, select once over the global
    batch and split the selection. Nothing waits for the GPU.

    Args:
        log_probs, advantages: of one shape, floating point. A token with a log-prob of -inf counts
            as masked: it would make every covariance infinite.
        loss_mode: clip_cov or kl_cov.
        response_mask: the same shape, bool or 0/1; None: all count.
        excluded: the same shape, bool or 0/1: tokens that clip_cov must not select (in verl those
            that the ratio clip already caught).
        generator: the source of the random choice, on the device of log_probs.

    Returns:
        bool, the shape of log_probs.

    Raises:
        ValueError: another mode, a ratio outside (0, 1], lower above upper, shapes, devices.
    """
    op = "select_by_covariance"
    check.not_none(op, log_probs=log_probs, advantages=advantages)
    check.choice(op, "loss_mode", loss_mode, SELECTION_MODES)
    check.number(op, "ratio", ratio, above=0, at_most=1)
    check.number(op, "lower", lower, infinite=True)
    check.number(op, "upper", upper, infinite=True)
    check.ordered(op, "lower", lower, "upper", upper)
    tokens, _ = token_arguments(
        op,
        {"log_probs": log_probs.detach(), "advantages": advantages.detach()},
        {"response_mask": response_mask, "excluded": excluded},
        None,
    )
    flat = tokens["log_probs"].to(compute_dtype(log_probs))
    mask = as_mask(tokens.get("response_mask"), flat) & ~flat.isneginf()
    count = mask.sum()

    def centred(values: Tensor) -> Tensor:
        values = zero_masked(values, mask)
        return values - values.sum() / count.clamp(min=1)

    covariance = centred(tokens["advantages"].to(flat.dtype)) * centred(flat)
    eligible, score = mask, covariance
    if loss_mode == "clip_cov":
        eligible = mask & (covariance > lower) & (covariance < upper)
        if "excluded" in tokens:
            eligible = eligible & ~tokens["excluded"]
        score = torch.rand(score.shape, generator=generator, device=score.device)
    order = torch.where(eligible, score, -torch.inf).argsort(descending=True, stable=True)
    num_selected = (count.double() * ratio).long().clamp(min=1)
    first = torch.arange(order.numel(), device=order.device) < num_selected
    selected = torch.zeros_like(mask).scatter(0, order, first)
    return (selected & eligible).view(log_probs.shape)
