"""pack_forest: sequences packed so that a common prefix is there once.

The layout is the depth-first order of the trie of all sequences: a node is a run of tokens, its
children continue it, so the descendants of a token follow it without a gap. One number per token
then says who sees it: query token i attends to key token j if and only if
j <= i < subtree_ends[j]. Packing without common prefixes is the case in which every tree is one
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, native, register_backends
from .reference import forest_reference

OP = "pack_forest"
register_backends(OP, cpu=("cpp", "reference"))


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
    input_ids: Tensor, cu_seqlens: Tensor, *, backend: str | None = None
) -> PackedForest:
    """Pack packed token sequences into a forest of their exact common prefixes.

    Roots and children are in the order of the first sequence through them: without a common prefix
    the order is that of the sequences. A sequence that is a prefix of another, or equal to it, adds
    no token. Takes time linear in S, on the CPU; tensors of another device are copied there, and
    the result is on their device.

    Args:
        input_ids: token ids of N sequences end to end, [S] int32 or int64.
        cu_seqlens: [N + 1] int32 or int64, 0 and the end of every sequence.

    Raises:
        ValueError: shapes or dtypes that do not fit, ends that do not start at 0, decrease or do
            not end at S, or more than 2^31 - 1 tokens.

    Examples:
        >>> ids = torch.tensor([5, 6, 7, 5, 6, 8, 9, 4])
        >>> forest = pack_forest(ids, torch.tensor([0, 3, 7, 8]))
        >>> forest.input_ids.tolist(), forest.position_ids.tolist()
        ([5, 6, 7, 8, 9, 4], [0, 1, 2, 2, 3, 0])
        >>> forest.subtree_ends.tolist(), forest.cu_seqlens.tolist()
        ([5, 5, 3, 5, 5, 6], [0, 5, 6])
        >>> forest.token_index.tolist()
        [0, 1, 2, 0, 1, 3, 4, 5]
    """
    check.not_none(OP, input_ids=input_ids, cu_seqlens=cu_seqlens)
    check.same_device(OP, input_ids=input_ids, cu_seqlens=cu_seqlens)
    check.untransformed(OP, input_ids=input_ids, cu_seqlens=cu_seqlens)
    check.shape(OP, "input_ids", input_ids, "S", {})
    tokens = check.ids(OP, "input_ids", input_ids).cpu()
    ends = check.cu_seqlens(OP, cu_seqlens.cpu(), tokens.shape[0])
    chosen = choose_backend(OP, tokens.device, backend)
    build = forest_reference if chosen == "reference" else native().pack_forest
    packed_ids, position_ids, subtree_ends, tree_ends, token_index = build(tokens, ends.long())
    device = input_ids.device
    return PackedForest(
        input_ids=packed_ids.to(device),
        position_ids=position_ids.to(device),
        subtree_ends=subtree_ends.to(device),
        cu_seqlens=tree_ends.to(device),
        max_seqlen=int(tree_ends.diff().max()) if tree_ends.numel() > 1 else 0,
        token_index=token_index.to(device),
    )
