"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv 2309.14509) over packed sequences.

Each rank of a group runs the model on its T / s tokens of one packed micro-batch. Attention alone
needs whole sequences: an all-to-all trades tokens for heads before it, and back after it, so every
rank attends over all tokens with H / s heads. Parameters do not know of it: their gradients on the
ranks add up to those of the whole micro-batch, which is the sum FSDP2 takes anyway.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import PretrainedConfig

from hybridengine.errors import ModelError

if TYPE_CHECKING:
    from hybridengine.model.forward import PackedBatch

__all__ = [
    "SequencePart",
    "check_sequence_parallel",
    "gather_rows",
    "heads_for_tokens",
    "split_sequence",
    "tokens_for_heads",
]

# Rotary frequencies that depend on the longest position in sight, which every rank sees another of.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_sequence_parallel(config: PretrainedConfig, size: int) -> None:
    """Raise ModelError where the model of `config` cannot share its sequences over `size` ranks."""
    text = config.get_text_config()
    if text.num_attention_heads % size:
        raise ModelError(
            f"ulysses_sequence_parallel_size is {size}, which does not divide the model's "
            f"{text.num_attention_heads} attention heads; choose a divisor"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {r.get("rope_type") for r in (rope, *rope.values()) if isinstance(r, dict)}
    if size > 1 and (found := kinds & _LENGTH_DEPENDENT_ROPE):
        raise ModelError(
            f"ulysses_sequence_parallel_size is {size}, but the rotary embedding of this model "
            f"({found.pop()}) depends on the longest sequence; set it to 1"
        )


@dataclass(frozen=True)
class SequencePart:
    """Which part of a packed micro-batch this rank of `group` runs: rows first:last of `rows`."""

    group: dist.ProcessGroup
    first: int
    last: int
    rows: int


def split_sequence(batch: PackedBatch, group: dist.ProcessGroup) -> PackedBatch:
    """This rank's part of `batch`: its tokens, and the response rows whose logits it computes.

    The tokens are padded at the end to a multiple of the group's size, as a sequence of their own.
    target_ids come from the whole batch, so a label may lie on the next rank.
    """
    size, rank = group.size(), group.rank()
    total = batch.input_ids.shape[0]
    padding = -total % size
    length = (total + padding) // size
    mine = slice(rank * length, (rank + 1) * length)
    filler = torch.arange(padding, device=batch.input_ids.device)
    first, last = torch.searchsorted(
        batch.logit_positions.cpu(), torch.tensor([mine.start, mine.stop])
    ).tolist()
    cu_seqlens = batch.cu_seqlens
    if padding:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([total + padding])])
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, torch.zeros_like(filler)])[mine],
        position_ids=torch.cat([batch.position_ids, filler])[mine],
        cu_seqlens=cu_seqlens,
        max_seqlen=max(batch.max_seqlen, padding),
        logit_positions=batch.logit_positions[first:last] - mine.start,
        target_ids=batch.target_ids[first:last],
        part=SequencePart(group, first, last, batch.logit_positions.shape[0]),
    )


def gather_rows(*rows: Tensor, part: SequencePart) -> tuple[Tensor, ...]:
    """Per-row results [R_part] of every rank -> [R] each, on every rank.

    Differentiable: every rank computes the same loss from them, and takes the gradient of its own.
    """
    return _GatherRows.apply(part, *rows)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: SequencePart, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.part = part
        ctx.set_materialize_grads(False)  # what nobody differentiates costs nothing
        whole = rows[0].new_zeros(len(rows), part.rows)
        whole[:, part.first : part.last] = torch.stack(rows)
        dist.all_reduce(whole, group=part.group)  # every element is one rank's, plus zeros
        return whole.unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        mine = slice(ctx.part.first, ctx.part.last)
        return None, *(None if grad is None else grad[mine] for grad in grads)


def heads_for_tokens(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """T / s tokens of all heads -> all T tokens of this rank's heads.

    q: [T/s, H, D], k and v: [T/s, H_kv, D*]; H is a multiple of H_kv and of s. Results [T, H/s, D]
    and [T, H_kv', D*], where key-value heads are repeated as far as s ranks need them.
    """
    size = group.size()
    if q.shape[1] % size:
        raise ModelError(
            f"an attention layer has {q.shape[1]} heads, which {size} ranks "
            "(ulysses_sequence_parallel_size) cannot share evenly; choose a divisor"
        )
    repeats = size // math.gcd(k.shape[1], size)
    k, v = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
    parts = [x.unflatten(1, (size, -1)) for x in (q, k, v)]
    shapes = [part.shape[2:] for part in parts]
    widths = [shape.numel() for shape in shapes]
    sent = torch.cat([part.flatten(2) for part in parts], dim=-1).transpose(0, 1)
    received = _exchange(sent, group).flatten(0, 1)
    whole = (x.unflatten(1, s) for x, s in zip(received.split(widths, -1), shapes, strict=True))
    q, k, v = whole
    return q, k, v


def tokens_for_heads(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All T tokens of this rank's heads, [T, H/s, D] -> T / s tokens of all heads, [T/s, H, D]."""
    sent = out.unflatten(0, (group.size(), -1))
    return _exchange(sent, group).transpose(0, 1).flatten(1, 2)


def _exchange(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[s, ...]: entry i goes to rank i, and comes from it; differentiable, its own adjoint."""
    return all_to_all_single_autograd(sent.contiguous(), None, None, group)
