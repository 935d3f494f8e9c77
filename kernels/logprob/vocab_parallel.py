"""token_log_probs with the vocabulary split over ranks: the collectives of its forward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .._library import custom_op
from .options import RowOptions


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name: operators take names, which torch.compile traces."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


@custom_op("hybridengine::vocab_range", mutates_args=())
def vocab_range(like: Tensor, vocab: int, group: str) -> Tensor:
    """Return int64 [2]: the first id of this rank's slice of `vocab` entries, and the total size.

    One all-gather of a number per rank; the result stays on the device of `like`.
    """
    rank = process_group(group).rank()
    size = torch.full((1,), vocab, dtype=torch.int64, device=like.device)
    sizes = _all_gather(size, group).flatten()
    return torch.stack([sizes[:rank].sum(), sizes.sum()])


@vocab_range.register_fake
def _(like: Tensor) -> Tensor:
    return like.new_empty(2, dtype=torch.int64)


def merge_partials(
    partial: Tensor, options: RowOptions, ignored: Tensor, want_squares: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge every rank's [T, 5] row sums (LogProbForward::partial) into the results of a row.

    One all-gather of 20 bytes per token and rank. Each rank merges in rank order, so all ranks get
    the same bits.
    """
    factor = options.factor
    partials = _all_gather(partial.contiguous(), options.group).double()  # [R, T, 5]
    y_max, e, e_d, token_y, e_e = partials.unbind(-1)
    row_max = y_max.amax(0)
    shift = (y_max - row_max) * factor
    shrink = shift.exp()
    shift = shift.masked_fill(shrink == 0, 0.0)  # -inf * 0 in a slice of removed entries only
    others = (e * shrink).sum(0)
    d = (token_y.amax(0) - row_max) * factor  # token_y is -inf on all ranks but one
    own = d.exp()
    total = others + own
    log_sum = torch.where(d == 0, others.log1p(), total.log())
    e_d_sum = ((e_d + shift * e) * shrink).sum(0) + torch.where(own > 0, own * d, 0.0)
    stats = [row_max, log_sum]
    if want_squares:
        stats.append(((e_e * shrink.square()).sum(0) + own.square()) / total.square())
    log_probs = log_sum - d if options.negate else d - log_sum
    results = log_probs, log_sum - e_d_sum / total, *stats
    log_probs, entropy, *stats = (x.masked_fill(ignored, 0.0).float() for x in results)
    return log_probs, entropy, torch.stack(stats, 1)


def gather_vocab(logits: Tensor, options: RowOptions) -> tuple[Tensor, RowOptions]:
    """Gather logits and vocab mask of the full vocabulary on every rank (reference backend)."""
    vocab_mask = options.vocab_mask
    if vocab_mask is not None:
        vocab_mask = _gather_columns(vocab_mask, options.group)
    logits = _gather_columns(logits, options.group)
    return logits, options._replace(vocab_mask=vocab_mask, vocab_range=None, group="")


def _gather_columns(tensor: Tensor, group: str) -> Tensor:
    """Gather [T, V_r] of every rank, of any size, as [T, V]."""
    size = torch.full((1,), tensor.shape[1], dtype=torch.int64, device=tensor.device)
    sizes = _all_gather(size, group).flatten().tolist()
    padded = tensor.new_zeros(tensor.shape[0], max(sizes))
    padded[:, : tensor.shape[1]] = tensor
    parts = _all_gather(padded, group)
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)


def _all_gather(tensor: Tensor, group: str) -> Tensor:
    """Gather [*shape] of every rank as [R, *shape]."""
    resolved = process_group(group)
    gathered = tensor.new_empty(resolved.size(), *tensor.shape)
    dist.all_gather_into_tensor(gathered.view(-1), tensor.view(-1), group=resolved)
    return gathered
