"""pack_forest: sequences packed so that a common prefix is there once.

The layout is the depth-first order of the trie of all sequences: a node is a run of tokens, its
children continue it, so the descendants of a token follow it without a gap. One number per token
then says who sees it: query token i attends to key token j if and only if
j <= i < subtree_ends[j]. Packing without common prefixes is the case in which every tree is one
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._backend import choose_backend, native, register_backends
from .packed import pack_sequences
from .reference import forest_reference

register_backends("pack_forest", cpu=("cpp", "reference"))


@dataclass(frozen=True)
class PackedForest:
    """T tokens of a forest in depth-first order, made of S tokens of N sequences, T <= S."""

    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], depth of the token in its tree, from 0 at the roots
    subtree_ends: Tensor  # int32 [T], packed position after the last descendant of the token
    cu_seqlens: Tensor  # int32 [number of trees + 1]
    max_seqlen: int  # tokens of the largest tree
    token_index: Tensor  # int64 [S], packed position of every token of the sequences, end to end


def pack_forest(
    sequences: Sequence, *, device: torch.device | str | None = None, backend: str | None = None
) -> PackedForest:
    """Pack token sequences into a forest of their exact common prefixes.

    Roots and children are in the order of the first sequence through them: without a common prefix
    the result is that of `pack_sequences`. A sequence that is a prefix of another, or equal to it,
    adds no token. Takes time linear in S, on the CPU.

    Args:
        sequences: N sequences of token ids, as in `pack_sequences`: lists or integer tensors [l].
        device: of the result; None: that of the tensors, the CPU for lists.

    Raises:
        ValueError: tokens that are not integers, or more than 2^31 - 1 of them.

    Example:
        >>> forest = pack_forest([[5, 6, 7], [5, 6, 8, 9], [4]])
        >>> forest.input_ids.tolist(), forest.position_ids.tolist()
        ([5, 6, 7, 8, 9, 4], [0, 1, 2, 2, 3, 0])
        >>> forest.subtree_ends.tolist(), forest.cu_seqlens.tolist()
        ([5, 5, 3, 5, 5, 6], [0, 5, 6])
        >>> forest.token_index.tolist()
        [0, 1, 2, 0, 1, 3, 4, 5]
    """
    packed = pack_sequences(sequences, device=device)
    [values] = packed.values
    if values.dim() != 1 or values.is_floating_point() or values.is_complex():
        raise ValueError(
            f"pack_forest: the sequences have shape {['l', *values.shape[1:]]} and dtype "
            f"{values.dtype}; expected token ids, integers of shape [l]"
        )
    tokens, ends = values.to("cpu", torch.int64).contiguous(), packed.cu_seqlens.cpu().long()
    chosen = choose_backend("pack_forest", tokens.device, backend)
    build = forest_reference if chosen == "reference" else native().pack_forest
    input_ids, position_ids, subtree_ends, cu_seqlens, token_index = build(tokens, ends)
    max_seqlen = int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0
    return PackedForest(
        input_ids=input_ids.to(values.device),
        position_ids=position_ids.to(values.device),
        subtree_ends=subtree_ends.to(values.device),
        cu_seqlens=cu_seqlens.to(values.device),
        max_seqlen=max_seqlen,
        token_index=token_index.to(values.device),
    )
