"""Packed: a batch of sequences laid end to end, and where each token came from.

`pack_sequences` makes it from ragged lists, in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from .. import _check as check

_MAX_TOKENS = 2**31 - 1  # cu_seqlens is int32


@dataclass(frozen=True)
class Packed:
    """T tokens of N sequences; sequence n is rows cu_seqlens[n] to cu_seqlens[n + 1].

    With a capacity, T is the capacity; rows past cu_seqlens[-1] belong to no sequence and hold the
    fill value.
    """

    values: tuple[Tensor, ...]  # each [T, ...]
    cu_seqlens: Tensor  # int32 [N + 1]
    position_ids: Tensor  # int64 [T], from 0 in every sequence
    max_seqlen: int  # with a capacity: the padded length, an upper bound
    indices: Tensor  # int64 [T], row in the flattened [N * padded_seqlen] batch; -1: no token
    padded_seqlen: int
    num_dropped: Tensor  # int64 [], tokens that did not fit the capacity (always 0 on the CPU)
    inverse: Tensor | None  # int64 [N * padded_seqlen], packed row or -1; None: not computed yet

    @property
    def batch_size(self) -> int:
        return self.cu_seqlens.numel() - 1


def inverse_order(indices: Tensor, num_rows: int) -> Tensor:
    """Return the position in `indices` of every row, -1 for rows not in it: int64 [num_rows]."""
    inverse = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=indices.device)
    positions = torch.arange(indices.size(0), device=indices.device)
    inverse[torch.where(indices < 0, num_rows, indices)] = positions  # -1 lands in the extra row
    return inverse[:num_rows]


def counts_before(flags: Tensor) -> Tensor:
    """Return how many of `flags` [T], 0 or 1, are before each token and in all: int32 [T + 1]."""
    return torch.nn.functional.pad(flags.cumsum(0, dtype=torch.int32), (1, 0))


def before_last_row(is_target: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return bool [T], the tokens with a target after them in their sequence, and each first token.

    No prediction of a target depends on the others, if attention is causal.

    Examples:
        >>> before_last_row(torch.tensor([0, 1, 0, 1, 0, 0, 0]), torch.tensor([0, 5, 7])).int()
        tensor([1, 1, 1, 0, 0, 1, 0], dtype=torch.int32)
    """
    counts, lengths = counts_before(is_target), cu_seqlens.diff()
    is_needed = counts[1:] < counts[cu_seqlens[1:]].repeat_interleave(lengths)
    is_needed[cu_seqlens[:-1][lengths > 0]] = True
    return is_needed


def pack_sequences(*fields: Sequence, device: torch.device | str | None = None) -> Packed:
    """Concatenate ragged sequences.

    Args:
        fields: one or more lists of N sequences each. A sequence is a list of numbers (integers
            become int64, floats float32) or a tensor [l, ...]; sequence n has the same length in
            every field. Differentiable where the sequences are tensors.
        device: the device of the result; None: that of the tensors, the CPU for lists.

    Raises:
        ValueError: fields of different lengths (the message names the sequence) or devices, or more
            than 2^31 - 1 tokens.

    Examples:
        >>> packed = pack_sequences([[5, 6, 7], [8]])
        >>> packed.values[0].tolist(), packed.position_ids.tolist(), packed.max_seqlen
        ([5, 6, 7, 8], [0, 1, 2, 0], 3)
    """
    lengths = _ragged_lengths(fields)
    values = tuple(_concatenate(field, device) for field in fields)
    check.same_device("pack_sequences", **{f"fields[{i}]": v for i, v in enumerate(values)})
    result_device = values[0].device
    lengths_N = torch.tensor(lengths, dtype=torch.int64)
    starts_N = lengths_N.cumsum(0) - lengths_N
    sequence_T = torch.repeat_interleave(lengths_N)
    position_ids = torch.arange(sum(lengths)) - starts_N[sequence_T]
    max_seqlen = max(lengths, default=0)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths_N.cumsum(0)
    return Packed(
        values=values,
        cu_seqlens=cu_seqlens.to(result_device),
        position_ids=position_ids.to(result_device),
        max_seqlen=max_seqlen,
        indices=(sequence_T * max_seqlen + position_ids).to(result_device),
        padded_seqlen=max_seqlen,
        num_dropped=torch.zeros((), dtype=torch.int64, device=result_device),
        inverse=None,
    )


def _ragged_lengths(fields: Sequence[Sequence]) -> list[int]:
    if not fields:
        raise ValueError("pack_sequences: no field given; expected at least one list of sequences")
    lengths = [len(sequence) for sequence in fields[0]]
    for f, field in enumerate(fields):
        if len(field) != len(lengths):
            raise ValueError(
                f"pack_sequences: field {f} has {len(field)} sequences, field 0 {len(lengths)}"
            )
        for n, sequence in enumerate(field):
            if len(sequence) != lengths[n]:
                raise ValueError(
                    f"pack_sequences: sequence {n} has length {len(sequence)} in field {f} and "
                    f"{lengths[n]} in field 0"
                )
    if sum(lengths) > _MAX_TOKENS:
        raise ValueError(
            f"pack_sequences: {sum(lengths)} tokens do not fit cu_seqlens, which is int32; "
            "pack fewer sequences at once"
        )
    return lengths


def _concatenate(field: Sequence, device: torch.device | str | None) -> Tensor:
    tensors = [sequence for sequence in field if isinstance(sequence, Tensor)]
    if tensors:
        if len(tensors) != len(field):
            raise ValueError("pack_sequences: a field mixes tensors and lists; use one kind")
        return torch.cat(tensors).to(device=device)
    flat = torch.tensor(list(chain.from_iterable(field)), device=device)
    return flat if flat.numel() else flat.to(torch.int64)
