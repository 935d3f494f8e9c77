"""The vocabulary-parallel side of token_log_probs: one small exchange between the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def rank_and_size(group: str) -> tuple[int, int]:
    if not group:
        return 0, 1
    resolved = dist.distributed_c10d._resolve_process_group(group)
    return resolved.rank(), resolved.size()


def merge_partials(
    partial: Tensor, factor: float | Tensor, group: str, ignored: Tensor, want_squares: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Join every rank's [T, 5] row sums (LogProbForward::partial) into the op's outputs.

    One all-gather of 20 bytes per token and rank; each rank then joins in rank order, so that all
    hold the same bits. `factor`: z = y * factor, a number or [T].
    """
    everyone = _all_gather(partial.contiguous(), group).double()  # [R, T, 5]
    y_max, e, e_d, token_y, e_e = everyone.unbind(-1)
    row_max = y_max.amax(0)
    shift = (y_max - row_max) * factor
    shrink = shift.exp()
    shift = shift.masked_fill(shrink == 0, 0.0)  # a slice of removed entries only: -inf * 0
    others = (e * shrink).sum(0)
    d = (token_y.amax(0) - row_max) * factor  # the other ranks hold -inf
    own = d.exp()
    total = others + own
    log_sum = torch.where(d == 0, others.log1p(), total.log())
    e_d_sum = ((e_d + shift * e) * shrink).sum(0) + torch.where(own > 0, own * d, 0.0)
    outputs = [d - log_sum, log_sum - e_d_sum / total, row_max, log_sum]
    if want_squares:
        outputs.append(((e_e * shrink.square()).sum(0) + own.square()) / total.square())
    else:
        outputs.append(row_max[:0])
    finished = [value.masked_fill(ignored[: len(value)], 0.0).float() for value in outputs]
    return tuple(finished)


def gathered_reference(logits: Tensor, options):
    """The whole vocabulary on every rank, as the reference wants it: logits and keep-mask."""
    keep_mask = options.keep_mask
    if keep_mask is not None:
        keep_mask = torch.cat(list(_all_gather(keep_mask.contiguous(), options.group)), dim=1)
    logits = torch.cat(list(_all_gather(logits.contiguous(), options.group)), dim=1)
    return logits, options._replace(keep_mask=keep_mask, group="")


def _all_gather(tensor: Tensor, group: str) -> Tensor:
    """[*shape] on every rank -> [size, *shape]."""
    resolved = dist.distributed_c10d._resolve_process_group(group)
    gathered = tensor.new_empty(resolved.size(), *tensor.shape)
    dist.all_gather_into_tensor(gathered.view(-1), tensor.view(-1), group=resolved)
    return gathered
