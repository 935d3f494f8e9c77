"""The reference backend of token_log_probs: its specification, in plain PyTorch.

`options` is RowOptions of row_options.py throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .vocab_parallel import gathered_reference


def reference_token_log_probs(
    logits: Tensor, token_ids: Tensor, options
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The specification, in plain differentiable PyTorch, in float64 for float64 logits.

    -> log_probs, entropy, row_max, log_sum, sum_p_squared, each [T].
    """
    y, log_p = _reference_rows(logits, token_ids, options)
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
        row_max = row_max / options.logit_scale  # as the kernels keep it: the raw logit
    outputs = (log_probs, entropy, row_max, log_sum, p.square().sum(-1))
    return tuple(v.masked_fill(bad, torch.nan).masked_fill(ignored, 0.0) for v in outputs)


def _reference_rows(logits, token_ids, options) -> tuple[Tensor, Tensor]:
    """y and log p, [T, V], with ignored rows replaced by zeros."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    x = x.masked_fill((token_ids == options.ignore_index)[:, None], 0.0) * options.logit_scale
    y = x if options.softcap == 0 else options.softcap * torch.tanh(x / options.softcap)
    if options.keep_mask is not None:
        y = y.masked_fill(~options.keep_mask, -torch.inf)
    temperature = options.temperature
    if options.temperatures is not None:
        temperature = options.temperatures[:, None].to(y.dtype)
    return y, torch.log_softmax(y / temperature, dim=-1)


def reference_forward(logits, token_ids, options, want_squares):
    if options.group:
        logits, options = gathered_reference(logits, options)
    outputs = reference_token_log_probs(logits, token_ids, options)
    return *outputs[:4], outputs[4] if want_squares else outputs[4][:0].clone()


def reference_backward(logits, token_ids, options, grad_log_probs, grad_entropy) -> Tensor:
    """The module's gradient formula; the tests hold it against autograd of the forward."""
    first, vocab = 0, logits.shape[1]
    if options.group:
        first = int(options.vocab_range[0])
        logits, options = gathered_reference(logits, options)
    y, log_p = _reference_rows(logits, token_ids, options)
    p = log_p.exp()
    gradient = torch.zeros_like(p)
    if grad_log_probs is not None:
        label = token_ids.clamp(0, logits.shape[1] - 1)[:, None]
        gradient += grad_log_probs[:, None] * (torch.zeros_like(p).scatter_(1, label, 1.0) - p)
    if grad_entropy is not None:
        finite = log_p.masked_fill(p == 0, 0.0)
        gradient -= grad_entropy[:, None] * p * (finite - (p * finite).sum(-1, keepdim=True))
    gradient *= options.logit_scale
    if options.softcap:
        gradient *= 1.0 - (y / options.softcap).square()
    if options.temperatures is not None:
        gradient /= options.temperatures[:, None]
    else:
        gradient /= options.temperature
    if options.keep_mask is not None:
        gradient = gradient.masked_fill(~options.keep_mask, 0.0)
    # A row nobody asks a gradient of gets exact zeros, even where its logits are NaN.
    asked = sum(grad != 0 for grad in (grad_log_probs, grad_entropy) if grad is not None) > 0
    gradient = gradient.where((asked & (token_ids != options.ignore_index))[:, None], 0.0)
    return gradient[:, first : first + vocab]
