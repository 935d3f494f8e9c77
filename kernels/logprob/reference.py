"""The reference backend of token_log_probs: its specification, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .options import RowOptions
from .vocab_parallel import gather_vocab


def reference_token_log_probs(
    logits: Tensor, token_ids: Tensor, options: RowOptions
) -> tuple[Tensor, ...]:
    """Compute log_probs, entropy, row_max, log_sum and sum_p_squared, each [T], differentiably.

    The arithmetic is float64 for float64 logits and float32 otherwise.
    """
    y, log_p = _distribution(logits, token_ids, options)
    p = log_p.exp()
    vocab = logits.shape[1]
    log_probs = log_p.gather(1, token_ids.clamp(0, vocab - 1)[:, None]).squeeze(1)
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
    row_max = y.amax(-1)
    log_sum = -log_p.amax(-1)
    ignored = token_ids == options.ignore_index
    bad = ~ignored & ((token_ids < 0) | (token_ids >= vocab))
    if logits.device.type == "cpu" and bad.any():
        row = int(bad.nonzero()[0])
        raise IndexError(
            f"token_log_probs: token_ids[{row}] is {int(token_ids[row])}, outside the vocabulary "
            f"of {vocab}; expected 0 <= id < {vocab} or ignore_index ({options.ignore_index})."
        )
    if options.softcap == 0:
        row_max = row_max / options.logit_scale  # the raw logit, as in the kernels
    outputs = (log_probs, entropy, row_max, log_sum, p.square().sum(-1))
    return tuple(v.masked_fill(bad, torch.nan).masked_fill(ignored, 0.0) for v in outputs)


def _distribution(logits: Tensor, token_ids: Tensor, options: RowOptions) -> tuple[Tensor, Tensor]:
    """Compute y and log p, [T, V], with ignored rows replaced by zeros."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    x = x.masked_fill((token_ids == options.ignore_index)[:, None], 0.0) * options.logit_scale
    y = x if options.softcap == 0 else options.softcap * torch.tanh(x / options.softcap)
    if options.vocab_mask is not None:
        y = y.masked_fill(~options.vocab_mask, -torch.inf)
    temperature: float | Tensor = options.temperature
    if options.temperatures is not None:
        temperature = options.temperatures[:, None].to(y.dtype)
    return y, torch.log_softmax(y / temperature, dim=-1)


def reference_forward(
    logits: Tensor, token_ids: Tensor, options: RowOptions, want_squares: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the results of `rows_forward`."""
    if options.group:
        logits, options = gather_vocab(logits, options)
    log_probs, entropy, *stats = reference_token_log_probs(logits, token_ids, options)
    row_stats = torch.stack(stats if want_squares else stats[:2], 1)
    return -log_probs if options.negate else log_probs, entropy, row_stats


def reference_backward(
    logits: Tensor,
    token_ids: Tensor,
    options: RowOptions,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Compute the gradient of the logits by the formula of op.py."""
    first, vocab = 0, logits.shape[1]
    if options.group:
        assert options.vocab_range is not None
        first = int(options.vocab_range[0])
        logits, options = gather_vocab(logits, options)
    y, log_p = _distribution(logits, token_ids, options)
    p = log_p.exp()
    gradient = torch.zeros_like(p)
    active = torch.zeros_like(token_ids, dtype=torch.bool)
    if grad_log_probs is not None:
        label = token_ids.clamp(0, logits.shape[1] - 1)[:, None]
        sign = -1.0 if options.negate else 1.0
        target = torch.zeros_like(p).scatter_(1, label, 1.0)
        gradient += sign * grad_log_probs[:, None] * (target - p)
        active |= grad_log_probs != 0
    if grad_entropy is not None:
        finite = log_p.masked_fill(p == 0, 0.0)
        gradient -= grad_entropy[:, None] * p * (finite - (p * finite).sum(-1, keepdim=True))
        active |= grad_entropy != 0
    gradient *= options.logit_scale
    if options.softcap:
        gradient *= 1.0 - (y / options.softcap).square()
    if options.temperatures is not None:
        gradient /= options.temperatures[:, None]
    else:
        gradient /= options.temperature
    if options.vocab_mask is not None:
        gradient = gradient.masked_fill(~options.vocab_mask, 0.0)
    # Rows with zero gradient get exact zeros, even if their logits are NaN.
    active &= token_ids != options.ignore_index
    return gradient.where(active[:, None], 0.0)[:, first : first + vocab]
