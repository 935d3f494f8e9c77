"""The vocabulary-parallel side of token_log_probs: two small exchanges between the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


@torch.library.custom_op("hybridengine::vocab_range", mutates_args=())
def vocab_range(like: Tensor, vocab: int, group: str) -> Tensor:
    """int64 [2]: the first id of this rank's slice of `vocab` entries, and the entries of all.

    One all-gather of a number per rank; the result stays on the device of `like`.
    """
    rank = dist.distributed_c10d._resolve_process_group(group).rank()
    mine = torch.full((1,), vocab, dtype=torch.int64, device=like.device)
    sizes = _all_gather(mine, group).flatten()
    return torch.stack([sizes[:rank].sum(), sizes.sum()])


@vocab_range.register_fake
def _(like, vocab, group):
    return like.new_empty(2, dtype=torch.int64)


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
        keep_mask = _gather_columns(keep_mask, options.group)
    logits = _gather_columns(logits, options.group)
    return logits, options._replace(keep_mask=keep_mask, vocab_range=None, group="")


def _gather_columns(tensor: Tensor, group: str) -> Tensor:
    """[T, V_r] on every rank -> [T, V], slices of any sizes."""
    mine = torch.full((1,), tensor.shape[1], dtype=torch.int64, device=tensor.device)
    sizes = _all_gather(mine, group).flatten().tolist()
    padded = tensor.new_zeros(tensor.shape[0], max(sizes))
    padded[:, : tensor.shape[1]] = tensor
    parts = _all_gather(padded, group)
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)


def _all_gather(tensor: Tensor, group: str) -> Tensor:
    """[*shape] on every rank -> [size, *shape]."""
    resolved = dist.distributed_c10d._resolve_process_group(group)
    gathered = tensor.new_empty(resolved.size(), *tensor.shape)
    dist.all_gather_into_tensor(gathered.view(-1), tensor.view(-1), group=resolved)
    return gathered
