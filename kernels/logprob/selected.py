"""token_log_probs of K entries of every row: token_ids [..., K].

log_prob_k = log_prob_a + z_k - z_a, with a the likeliest of the K entries: the log-prob of one
label comes from the row kernel, the others from the K gathered logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _check as check
from .._per_token import compute_dtype


def selected_entries(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    vocab_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the label of every row, z of its K entries less that of the label, and their mask.

    Args:
        logits: [..., V]; token_ids: [..., K] int64 with K > 0; the others as in `token_log_probs`.

    Returns:
        labels [...], ignore_index for a row without another entry; differences [..., K] in float32
        or float64, differentiable, -inf for removed entries and NaN for labels out of range (on a
        GPU; on a CPU they are an error); bool [..., K]: entries that are not ignored.
    """
    vocab = logits.shape[-1]
    valid = token_ids != ignore_index
    bad = valid & ((token_ids < 0) | (token_ids >= vocab))
    if check.readable(bad) and bad.any():
        where = bad.nonzero()[0].tolist()
        raise IndexError(
            f"token_log_probs: token_ids{where} is {int(token_ids[tuple(where)])}, outside the "
            f"vocabulary of {vocab}; expected 0 <= id < {vocab} or ignore_index ({ignore_index})."
        )
    ids = token_ids.masked_fill(~valid | bad, 0)
    z = logits.gather(-1, ids).to(compute_dtype(logits)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    removed = z.isneginf()
    if vocab_mask is not None:
        removed = removed | ~check.mask("token_log_probs", "vocab_mask", vocab_mask).gather(-1, ids)
    candidates = torch.where(valid & ~bad & ~removed, z.detach(), -torch.inf)
    best = candidates.argmax(-1, keepdim=True)
    # A row of -inf only: its first entry that is not ignored.
    none = candidates.gather(-1, best).isneginf()
    best = torch.where(none, valid.int().argmax(-1, keepdim=True), best)
    labels = ids.gather(-1, best).squeeze(-1).masked_fill(~valid.any(-1), ignore_index)
    anchor = z.gather(-1, best).masked_fill(none, 0.0)
    differences = torch.where(removed, 0.0, z) - anchor
    differences = differences.masked_fill(removed, -torch.inf).masked_fill(bad, torch.nan)
    return labels, differences, valid


def selected_results(results: tuple[Any, ...], differences: Tensor, valid: Tensor) -> tuple:
    """Return the results of `token_log_probs` for the labels with log_probs [..., K]."""
    label_log_probs, *others = results
    removed = differences.isneginf()
    # Not of a row whose label is removed, too: -inf has no gradient.
    own = label_log_probs.masked_fill(label_log_probs.isneginf(), 0.0).unsqueeze(-1)
    log_probs = torch.where(removed, -torch.inf, own + differences.masked_fill(removed, 0.0))
    return torch.where(valid, log_probs, 0.0), *others
