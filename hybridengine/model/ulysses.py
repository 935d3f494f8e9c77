"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv 2309.14509) over packed sequences.

Each of the s ranks of a group runs the model on T / s tokens of one packed micro-batch. Only
attention needs full sequences: an all-to-all before it gathers the sequence and scatters the heads,
one after it does the reverse, so every rank attends over all T tokens with H / s heads. The
gradients of the ranks sum to that of the full micro-batch; FSDP2 reduces them as for data
parallelism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from hybridengine.run.errors import ModelError


@dataclass(frozen=True)
class SequenceShard:
    """This rank's result rows of a packed micro-batch of `num_rows`, in ascending order."""

    group: dist.ProcessGroup
    rows: Tensor  # int64 [R_local], on the CPU
    num_rows: int


def gather_rows(*rows: Tensor, shard: SequenceShard) -> tuple[Tensor, ...]:
    """Gather per-row results [R_local] of all ranks to [R] each, on every rank.

    Differentiable: every rank computes the same loss, and receives the gradient of its own rows.
    """
    full = rows[0].new_zeros(len(rows), shard.num_rows)
    index = shard.rows.to(full.device)
    full[:, index] = torch.stack(rows).detach()
    dist.all_reduce(full, group=shard.group)  # exact: one rank's value plus zeros
    gathered = tuple(row.clone() for row in full)
    for out, row in zip(gathered, rows, strict=True):
        out[index] = row  # the same values, with their gradient
    return gathered


def gather_seq_scatter_heads(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange T / s tokens of all heads for all T tokens of H / s heads.

    q: [T/s, H, D], k and v: [T/s, H_kv, D*]; H is a multiple of H_kv and of s. Return [T, H/s, D]
    and [T, H_kv', D*]; key-value heads are repeated if s does not divide their number.
    """
    size = group.size()
    if q.shape[1] % size:
        raise ModelError(
            f"an attention layer has {q.shape[1]} heads, which {size} ranks "
            "(ulysses_sequence_parallel_size) cannot split evenly; choose a divisor"
        )
    repeats = size // math.gcd(k.shape[1], size)
    k, v = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
    parts = [x.unflatten(1, (size, -1)) for x in (q, k, v)]
    shapes = [part.shape[2:] for part in parts]
    widths = [shape.numel() for shape in shapes]
    sent = torch.cat([part.flatten(2) for part in parts], dim=-1).transpose(0, 1)
    received = _exchange(sent, group).flatten(0, 1)
    q, k, v = (x.unflatten(1, s) for x, s in zip(received.split(widths, -1), shapes, strict=True))
    return q, k, v


def gather_heads_scatter_seq(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all T tokens of H / s heads for T / s tokens of all heads: -> [T/s, H, D]."""
    sent = out.unflatten(0, (group.size(), -1))
    return _exchange(sent, group).transpose(0, 1).flatten(1, 2)


def _exchange(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all of [s, ...], differentiable: send entry i to rank i, receive entry i from it."""
    return all_to_all_single_autograd(sent.contiguous(), None, None, group)
