"""Sequences end to end without padding, with common prefixes once: what a forward pass takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.kernels import pack_forest, pack_sequences
from hybridengine.kernels.packing.packed import before_last_row, counts_before
from hybridengine.run.errors import ModelError

TokenIds = Sequence[int] | Tensor  # a list, or integers [l] on the CPU


class Part:
    """Values for the tokens, or for the result rows, of a packed batch.

    A part follows its batch while it is packed: `share`, `pad`, `finish`, `local`, `to`. Values
    with an entry per token override `share`, `pad` and `local`. In the forward pass of the batch,
    the model gets `arguments` inside of `context`.
    """

    def distinct_ids(self, input_ids: Tensor) -> Tensor:
        """Return token ids [T], other ones where equal tokens differ in this part."""
        return input_ids

    def share(self, token_index: Tensor, num_tokens: int) -> Part:
        """Return the part of a batch whose common prefixes are packed once.

        token_index: int32 [T], of each token among `num_tokens` packed ones.
        """
        return self

    def filler(self) -> tuple[int, int] | None:
        """Return (token id, number) of tokens of no sequence that the part needs; None: none."""
        return None

    def pad(self, padding: int) -> Part:
        """Append values for `padding` tokens of no sequence."""
        return self

    def finish(self, cu_seqlens: Tensor, subtree_ends: Tensor | None) -> Part:
        """Compute what depends on the packed sequences, after `share` and `pad`."""
        return self

    def local(self, tokens: slice, rows: Tensor) -> Part:
        """Return the values of a rank that has these of the batch's tokens and result rows."""
        return self

    def as_dummy(self) -> Part | None:
        """Return the part of a batch that counts for nothing; None: it has none."""
        return self

    def to(self, device: torch.device | str) -> Part:
        """Move the tensors that the model reads."""
        return self

    def arguments(self, position_ids: Tensor) -> Mapping[str, Any]:
        """Return keyword arguments of the model; position_ids: int64 [1, T]."""
        return {}

    def context(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return what is open while `model` computes the batch."""
        return nullcontext()


class PartSource(Protocol):
    """Values for sequences from which `pack_rollouts` and `pack_batch` make a part.

    needs_tails: `place` reads tokens after the last row of a sequence, on which no row depends.
    """

    needs_tails: ClassVar[bool]

    def select(self, sequences: Sequence[int], rows: Tensor) -> PartSource:
        """Select the values of some sequences, whose result rows are `rows`."""

    def place(self, input_ids: Tensor, cu_seqlens: Tensor) -> Part:
        """Return the part of sequences that are end to end in input_ids [T]."""


@dataclass(frozen=True)
class SequenceShard:
    """This rank's result rows of a packed micro-batch of `num_rows`, in ascending order."""

    group: dist.ProcessGroup
    rows: Tensor  # int64 [R_local], on the CPU
    num_rows: int


class SavedWork(NamedTuple):
    """What plain packing would compute and a batch with shared prefixes does not."""

    tokens: int = 0
    pairs: int = 0  # of a token and a key that it attends to, in a layer without a window


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of N sequences, and R result rows: the tokens with loss mask 1, in their order.

    Plain packing concatenates the sequences. With `shared_prefix` each ends at its last row. With
    `subtree_ends` a common prefix is there once (`hybridengine.kernels.pack_forest`): the sequences
    of cu_seqlens are then trees, and logit_positions are neither sorted nor unique, as the last
    token of a prompt predicts the first token of each of its responses.

    With `shard` set, input_ids, position_ids, logit_positions and target_ids are this rank's shard
    of the batch; R is then the number of rows of all ranks.

    A micro-batch is a part of a larger batch, whose rows it selects by `take`.
    is_dummy: the rank only takes part in the collectives of forward and backward.
    active_rows: int64, ascending, the rows that may have a gradient; None: all may.
    has_gradient: False where no row has one, so that the forward pass is all there is to compute.
    """

    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], of the token in its sequence, from 0
    cu_seqlens: Tensor  # int32 [N + 1]
    max_seqlen: int
    logit_positions: Tensor  # int64 [R], token_index of the row that predicts target_ids
    target_ids: Tensor  # int64 [R]
    row_index: Tensor  # int64 [R], of each row in the batch that this is a part of
    cu_rows: Tensor  # int32 [sequences + 1], the rows of each sequence
    shard: SequenceShard | None = None
    subtree_ends: Tensor | None = None  # int32 [T] of all ranks; None: plain packing
    tree_position_ids: Tensor | None = None  # with subtree_ends: position_ids of all ranks
    saved: SavedWork = field(default_factory=SavedWork)  # over all ranks that share the batch
    parts: Mapping[str, Part] = field(default_factory=dict)  # such as the `KeptIds` "kept"
    padding: int = 0  # the last tokens here that are of no sequence
    is_dummy: bool = False
    active_rows: Tensor | None = None
    has_gradient: bool = True

    @cached_property
    def distinct_positions(self) -> tuple[Tensor, Tensor] | None:
        """Return logit_positions, each once [D], and the index of each row in them [R], int64.

        None if no position repeats. On a GPU this waits for the device.
        """
        once, index = self.logit_positions.unique(return_inverse=True)
        return (once, index) if len(once) < len(index) else None

    @overload
    def take(self, per_row: Tensor) -> Tensor: ...
    @overload
    def take(self, per_row: None) -> None: ...
    def take(self, per_row: Tensor | None) -> Tensor | None:
        """Select the rows of a column of the batch that this is a part of: [all rows] -> [R]."""
        return None if per_row is None else per_row[self.row_index]

    def as_dummy(self) -> PackedBatch:
        """Return it as a dummy, which counts for nothing."""
        dummies = {name: part.as_dummy() for name, part in self.parts.items()}
        parts = {name: part for name, part in dummies.items() if part is not None}
        return replace(self, is_dummy=True, saved=SavedWork(), parts=parts)

    def to(self, device: torch.device | str) -> PackedBatch:
        """Move the tensors; `shard` stays on the CPU."""
        tensors = {n: x for n, x in vars(self).items() if isinstance(x, Tensor)}
        moved: dict[str, Any] = {n: x.to(device) for n, x in tensors.items()}
        parts = {name: part.to(device) for name, part in self.parts.items()}
        return replace(self, parts=parts, **moved)


def pack_rollouts(
    rollouts: Sequence[tuple[TokenIds, TokenIds]],
    device: torch.device | str = "cpu",
    sequence_parallel: dist.ProcessGroup | None = None,
    *,
    shared_prefix: bool = False,
    parts: Mapping[str, PartSource] = MappingProxyType({}),
) -> PackedBatch:
    """Pack (prompt_ids, response_ids) pairs; the R result rows are in the order of the pairs.

    sequence_parallel: the ranks that share this batch; all of them pass the same pairs.
    shared_prefix: pack common prefixes, such as the prompt of several responses, once, and no
      tokens after the last row of a sequence.
    parts: what the batch carries beside its tokens, of these pairs.

    Raises:
        ModelError: a pair without prompt tokens, as nothing predicts its first token, or a part
            that does not fit the tokens.

    Examples:
        >>> batch = pack_rollouts([([5, 6], [7, 8]), ([9], [5])])
        >>> batch.logit_positions.tolist(), batch.target_ids.tolist()
        ([1, 2, 4], [7, 8, 5])
    """
    if empty := [i for i, (prompt, _) in enumerate(rollouts) if not len(prompt)]:
        raise ModelError(f"rollout {empty[0]} has no prompt tokens; a prompt needs at least one")
    ids = [torch.as_tensor(x, dtype=torch.int64) for pair in rollouts for x in pair]
    packed = pack_sequences(ids)
    is_target = (torch.arange(len(ids)) % 2 == 1).repeat_interleave(packed.cu_seqlens.diff())
    cu_seqlens = packed.cu_seqlens[::2].contiguous()
    batch = _pack(packed.values[0], cu_seqlens, is_target, sequence_parallel, shared_prefix, parts)
    return batch.to(device)


def pack_batch(
    sequences: Sequence[Sequence[int]],
    loss_mask: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    sequence_parallel: dist.ProcessGroup | None = None,
    *,
    shared_prefix: bool = False,
    parts: Mapping[str, PartSource] = MappingProxyType({}),
) -> PackedBatch:
    """Pack sequences; tokens with `loss_mask` 1 are predicted.

    loss_mask: for each sequence one 0 or 1 per token; 0 at the first token. It may differ between
      equal prefixes: rows belong to sequences, not to packed tokens.
    shared_prefix: pack common prefixes once, and no tokens after the last row of a sequence.
    parts: what the batch carries beside its tokens, of these sequences.

    Raises:
        ModelError: a part that does not fit the tokens.
    """
    packed = pack_sequences(sequences, loss_mask)
    input_ids, is_target = packed.values
    batch = _pack(input_ids, packed.cu_seqlens, is_target, sequence_parallel, shared_prefix, parts)
    return batch.to(device)


def _pack(
    input_ids: Tensor,
    cu_seqlens: Tensor,
    is_target: Tensor,
    sequence_parallel: dist.ProcessGroup | None,
    shared_prefix: bool,
    parts: Mapping[str, PartSource],
) -> PackedBatch:
    """Pack sequences that are end to end in `input_ids` [T]; all tensors are on the CPU."""
    lengths = cu_seqlens.diff().long()
    positions = torch.arange(input_ids.shape[0]) - cu_seqlens[:-1].long().repeat_interleave(lengths)
    targets, is_kept = is_target.nonzero().flatten(), torch.ones_like(input_ids, dtype=torch.bool)
    if shared_prefix and not any(source.needs_tails for source in parts.values()):
        is_kept = before_last_row(is_target, cu_seqlens)
    kept = counts_before(is_kept)
    ids, ends = input_ids[is_kept], kept[cu_seqlens]
    batch = PackedBatch(
        input_ids=ids,
        position_ids=positions[is_kept],
        cu_seqlens=ends,
        max_seqlen=max(ends.diff().tolist(), default=0),
        logit_positions=kept[targets - 1].long(),
        target_ids=input_ids[targets],
        row_index=torch.arange(targets.shape[0]),
        cu_rows=counts_before(is_target)[cu_seqlens],
        parts={name: source.place(ids, ends) for name, source in parts.items()},
    )
    if shared_prefix:
        batch = _share_prefixes(batch)
        tokens = positions.shape[0] - batch.input_ids.shape[0]
        others = int(positions.sum() - batch.position_ids.sum())  # keys besides a token's own
        batch = replace(batch, saved=SavedWork(tokens, tokens + others))
    for name in batch.parts:
        if (filler := batch.parts[name].filler()) is not None:
            batch = _pad(batch, *filler)
    finished = {n: p.finish(batch.cu_seqlens, batch.subtree_ends) for n, p in batch.parts.items()}
    batch = replace(batch, parts=finished)
    return batch if sequence_parallel is None else _split_sequence(batch, sequence_parallel)


def _share_prefixes(batch: PackedBatch) -> PackedBatch:
    """Pack the common prefixes of plainly packed sequences once, with the parts in them."""
    ids = batch.input_ids
    for part in batch.parts.values():
        ids = part.distinct_ids(ids)
    forest = pack_forest(ids, batch.cu_seqlens)
    num_tokens = forest.input_ids.shape[0]
    if num_tokens == batch.input_ids.shape[0]:
        return batch
    input_ids = forest.input_ids.index_copy(0, forest.token_index.long(), batch.input_ids)
    return replace(
        batch,
        input_ids=input_ids,
        position_ids=forest.position_ids,
        cu_seqlens=forest.cu_seqlens,
        max_seqlen=forest.max_seqlen,
        logit_positions=forest.token_index[batch.logit_positions],
        subtree_ends=forest.subtree_ends,
        tree_position_ids=forest.position_ids,
        parts={n: part.share(forest.token_index, num_tokens) for n, part in batch.parts.items()},
    )


def _pad(batch: PackedBatch, token_id: int, padding: int) -> PackedBatch:
    """Append a sequence, or tree, of `padding` tokens of no sequence; no rows."""
    filler, total = torch.arange(padding), batch.input_ids.shape[0] + padding
    position_ids = torch.cat([batch.position_ids, filler])
    cu_seqlens, subtree_ends = batch.cu_seqlens, batch.subtree_ends
    if padding:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([total])])
    if subtree_ends is not None:
        subtree_ends = torch.cat([subtree_ends, subtree_ends.new_full((padding,), total)])
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, torch.full_like(filler, token_id)]),
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        max_seqlen=max(batch.max_seqlen, padding),
        subtree_ends=subtree_ends,
        tree_position_ids=None if subtree_ends is None else position_ids,
        parts={name: part.pad(padding) for name, part in batch.parts.items()},
        padding=batch.padding + padding,
    )


def _split_sequence(batch: PackedBatch, group: dist.ProcessGroup) -> PackedBatch:
    """Return this rank's shard of `batch`: its tokens, and the rows whose logits it computes.

    Padding to a multiple of the group's size is appended as a sequence, or tree, of its own.
    target_ids come from the full batch, as the target of a rank's last token is on the next rank.
    """
    size, rank, total = group.size(), group.rank(), batch.input_ids.shape[0]
    batch = _pad(batch, 0, -total % size)
    length = batch.input_ids.shape[0] // size
    local = slice(rank * length, (rank + 1) * length)
    rows = (batch.logit_positions // length == rank).nonzero().flatten()
    return replace(
        batch,
        input_ids=batch.input_ids[local],
        position_ids=batch.position_ids[local],
        logit_positions=batch.logit_positions[rows] - local.start,
        target_ids=batch.target_ids[rows],
        shard=SequenceShard(group, rows, batch.logit_positions.shape[0]),
        parts={name: part.local(local, rows) for name, part in batch.parts.items()},
        padding=min(length, max(0, local.stop - total)),
    )
