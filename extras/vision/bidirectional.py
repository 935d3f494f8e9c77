"""Tokens that attend to each other in both directions inside of causal sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridengine.model.attention import BidirectionalSpan


def find_spans(
    starts: Sequence[int],
    lengths: Sequence[int],
    cu_seqlens: Tensor,
    subtree_ends: Tensor | None,
) -> tuple[BidirectionalSpan, ...]:
    """Return the spans of packed tokens that begin at `starts`, with `lengths` tokens each.

    cu_seqlens: int32 [N + 1], of sequences, or of trees.
    subtree_ends: integers [T] of a packed forest, in which no span branches; None: sequences.
    """
    spans = []
    for start, length in zip(starts, lengths, strict=True):
        if subtree_ends is None:
            first = int(cu_seqlens[cu_seqlens <= start][-1])
            before = torch.arange(first, start)
        else:
            before = (subtree_ends[:start] > start).nonzero().flatten()
        index = torch.cat([before, torch.arange(start, start + length)])
        spans.append(BidirectionalSpan(index, length))
    return tuple(spans)
