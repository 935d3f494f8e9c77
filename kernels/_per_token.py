"""The conventions that operators over tokens share: shapes, masks, sequences and dtypes.

Per-token arguments are [T], packed tokens with the sequences at cu_seqlens, or [B, L], whose rows
are the sequences. Masks are bool or 0/1 numbers, and what masked tokens hold does not matter.
float64 is computed in float64, every other dtype in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _check as check


def token_arguments(
    op: str,
    floats: dict[str, Tensor | None],
    masks: dict[str, Tensor | None],
    cu_seqlens: Tensor | None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Check the per-token arguments of an operator and flatten them.

    Args:
        floats: name → [T] or [B, L]. The first one is not None and sets the shape and the device.
        masks: name → bool or 0/1 numbers of that shape; they become bool.
        cu_seqlens: [N + 1] int32 or int64, or None; must be None with [B, L]. Tokens past its end
            must be masked in masks["response_mask"].

    Returns:
        (arguments by name, each [T], without those that are None; cu_seqlens, made here for
        [B, L]).
    """
    given = {**floats, **masks}
    check.same_device(op, **given, cu_seqlens=cu_seqlens)
    check.floats(op, **floats)
    tokens = {name: tensor for name, tensor in given.items() if tensor is not None}
    name = next(iter(floats))
    shape = tokens[name].shape
    if len(shape) not in (1, 2):
        raise ValueError(
            f"{op}: {name} has shape {list(shape)}; expected [T], packed tokens, or [B, L]."
        )
    for other, tensor in tokens.items():
        if tensor.shape != shape:
            raise ValueError(
                f"{op}: {other} has shape {list(tensor.shape)}; expected {list(shape)} like {name}."
            )
    for other, mask in masks.items():
        if mask is not None:
            tokens[other] = check.mask(op, other, mask)
    if len(shape) == 1:
        if cu_seqlens is not None:
            response_mask = tokens.get("response_mask")
            cu_seqlens = check.cu_seqlens(op, cu_seqlens, shape[0], response_mask)
        return tokens, cu_seqlens
    if cu_seqlens is not None:
        raise ValueError(
            f"{op}: cu_seqlens is given and {name} has shape {list(shape)}; the rows are "
            "the sequences of [B, L]: leave cu_seqlens out, or pack the tokens to [T]."
        )
    cu_seqlens = row_cu_seqlens(tokens[name])
    return {other: tensor.reshape(-1) for other, tensor in tokens.items()}, cu_seqlens


def row_cu_seqlens(values: Tensor) -> Tensor:
    """Return the cu_seqlens of the flattened rows of [B, L]: int32 [B + 1]."""
    rows, length = values.shape
    if length == 0:
        return torch.zeros(rows + 1, device=values.device, dtype=torch.int32)
    end = rows * length + 1
    return torch.arange(0, end, length, device=values.device, dtype=torch.int32)


def compute_dtype(values: Tensor) -> torch.dtype:
    """Return float64 for float64, float32 for everything else."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def choose_number(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """Return `yes` where the condition holds, else `no`. (torch.where makes float32 of numbers.)"""
    return torch.where(condition, torch.full((), yes, dtype=dtype, device=condition.device), no)


def unit_inner_stride(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if the stride of its last dimension is not 1.

    (`contiguous()` keeps the strides of a tensor without elements: the kernels do not read them,
    but torch's own products do.)
    """
    return tensor if tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def as_mask(response_mask: Tensor | None, like: Tensor) -> Tensor:
    """Return the mask as bool; all True for None."""
    if response_mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    return response_mask.bool()


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` with 0 where masked, so that a NaN there reaches no arithmetic."""
    return torch.where(mask, values, 0)


def row_index(ends: Tensor, entries: int) -> Tensor:
    """Return the row of every entry, int64 [K], within [0, T) whatever `ends` [T + 1] holds."""
    rows = torch.searchsorted(ends, torch.arange(entries, device=ends.device), right=True)
    return (rows - 1).clamp(0, max(ends.shape[0] - 2, 0))


def segment_reduce(values: Tensor, ends: Tensor, reduce: str) -> Tensor:
    """Reduce [K] to [T] in a fixed order; an empty row is 0 for "sum" and -inf for "max"."""
    initial = {"sum": 0.0, "max": -torch.inf}[reduce]
    return torch.segment_reduce(values, reduce, offsets=ends.long(), initial=initial, unsafe=True)


class TokenSequences(NamedTuple):
    """The sequence of every token; tokens past the last one are in an extra, ignored sequence."""

    ids: Tensor  # [T] int64, number of the token's sequence
    lengths: Tensor  # [N + 1] int64, unmasked tokens per sequence

    @staticmethod
    def of(cu_seqlens: Tensor, mask: Tensor) -> TokenSequences:
        token_index = torch.arange(mask.numel(), device=mask.device)
        ids = torch.searchsorted(cu_seqlens[1:].long(), token_index, right=True)
        lengths = torch.zeros(cu_seqlens.numel(), dtype=torch.int64, device=mask.device)
        return TokenSequences(ids, lengths.index_add(0, ids, mask.long()))

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over the unmasked tokens of each token's sequence, [T].

        Sums are float64: in float32 those of 10^5 tokens would lose their last digits.
        """
        sums = torch.zeros(self.lengths.shape, dtype=torch.float64, device=values.device)
        sums = sums.index_add(0, self.ids, zero_masked(values, mask).double())
        return (sums / self.lengths.clamp(min=1)).to(values.dtype)[self.ids]

    def sum(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the sum over the unmasked tokens of each token's sequence, [T]."""
        return self.mean(values, mask) * self.lengths[self.ids]
