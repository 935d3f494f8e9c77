"""Buckets whose deltas travel together: from changes of shards to messages, and into the engine.

A delta follows the same tables of strided copies as a dense sync (`tables`), one change
at a time. As its changes are few, it packs many buckets at once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from hybridengine.kernels import Changed
from hybridengine.kernels.delta import ChangeTable, decode_gaps, encode_gaps
from hybridengine.remote.sync.changes import (
    ChangeFinder,
    Found,
    Part,
    covers,
    find_changes,
    group_size,
)
from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.buckets import Bucket
from hybridengine.sync.mover import Mover
from hybridengine.sync.source_class import Chunk
from hybridengine.sync.tables import ExchangeBuilder, Weights
from hybridengine.sync.trainers import Trainers
from hybridengine.sync.transport import Pending, Transport, run_transfers
from hybridengine.sync.weight_target import EngineState, WeightTarget, bit_checksums

_ALIGNMENT = 8  # bytes of a message: the next one is aligned for its values and its checksum


class Header(NamedTuple):
    """What a receiver knows before the message arrives; all zero but the versions for no changes.

    base, new: see `Versions`.
    gap_width: bytes of a field of the gaps.
    gap_bytes: the bytes of all gaps.
    checksum: the checksum of the message.
    """

    base: int
    new: int
    num_changes: int
    gap_width: int
    gap_bytes: int
    checksum: int

    @property
    def num_bytes(self) -> int:
        """The size of the message."""
        size = 2 * self.num_changes + self.gap_bytes
        return -(-size // _ALIGNMENT) * _ALIGNMENT


HEADER_BYTES = 8 * len(Header._fields)


class CorruptDeltaError(ValueError):
    """A message does not match its header, or its header does not match the engine."""


class Versions(NamedTuple):
    """The version of the engine's weights that a delta applies to, and the one that it makes."""

    base: int
    new: int


def encode(
    positions: torch.Tensor,
    values: torch.Tensor,
    cuts: Sequence[int],
    starts: Sequence[int],
    versions: Versions,
) -> tuple[list[Header], torch.Tensor]:
    """Return the header of each message, and all messages in a row, uint8.

    positions: ascending, int64 [K].
    values: [K], of 16 bits.
    cuts: where the changes of each message begin, and K.
    starts: the first position of the elements of each message, and their end.
    """
    headers, nothing = list[Header](), positions.new_empty(0, dtype=torch.uint8)
    pieces = [nothing]
    for low, high, start in zip(cuts, cuts[1:], starts, strict=False):
        gaps, width = encode_gaps(positions[low:high], start) if low < high else (nothing, 1)
        header = Header(*versions, high - low, width, len(gaps), 0)
        padding = nothing.new_zeros(header.num_bytes - 2 * header.num_changes - len(gaps))
        pieces += [values[low:high].view(torch.uint8), gaps, padding]
        headers.append(header)
    outgoing = torch.cat(pieces)
    checksums = bit_checksums(outgoing.split([header.num_bytes for header in headers]))
    return [h._replace(checksum=c) for h, c in zip(headers, checksums, strict=True)], outgoing


def decode(
    headers: Sequence[Header],
    messages: Sequence[torch.Tensor],
    dtype: torch.dtype,
    counts: Sequence[int],
    versions: Versions,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the positions int64 [K] and the values [K], of `dtype`, of each sender's message.

    counts: elements that a dense sync would receive from each sender; positions count among them.

    Raises CorruptDeltaError if a message is not the one its header describes, or is made from
    another version.
    """
    positions, values = list[torch.Tensor](), list[torch.Tensor]()
    checksums = bit_checksums(messages)
    for sender, (header, message, checksum) in enumerate(
        zip(headers, messages, checksums, strict=True)
    ):
        try:
            if header[:2] != versions:
                raise CorruptDeltaError(
                    f"it leads from version {header.base} to {header.new}, expected "
                    f"{versions.base} to {versions.new}"
                )
            if checksum != header.checksum:
                raise CorruptDeltaError("its checksum differs from that of its sender")
            count, middle = header.num_changes, 2 * header.num_changes
            gaps = message[middle : middle + header.gap_bytes]
            positions.append(decode_gaps(gaps, header.gap_width, 0, counts[sender], count))
            values.append(message[:middle].view(dtype))
        except ValueError as error:
            raise CorruptDeltaError(
                f"the delta from rank {sender} was not applied: {error}"
            ) from error
    return positions, values


Changes = Mapping[Part, Changed]


class DeltaGroup:
    """The tables of one rank for some buckets, as those of `Exchange` for one.

    parts: the changes that `encode` and `write_local` read.
    checksums: engine tensor → by how much its `bit_checksum` has grown.
    checksums_known: whether the kernels compute that.
    """

    checksums_known = True

    def __init__(self, builder: ExchangeBuilder, bucket: Bucket) -> None:
        rows = builder.rows(bucket)
        self._pack, self._local, self._unpack = (
            ChangeTable(torch.from_numpy(table), builder.device)
            for table in (rows.pack, rows.local, rows.unpack)
        )
        self._destinations, self._receive_counts = rows.destinations, rows.receive_counts
        self._dtype = dtype = bucket.engine_dtype
        self.parts = [Part(n, dtype, b if bucket.merged else None) for n, b in rows.sources]
        # Where the elements of each rank begin in the order of sending, and the end.
        self._send_starts = [0, *itertools.accumulate(rows.send_counts)]
        self.checksums = Counter[str]()

    def _lists(self, changes: Changes) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        found = [changes[part] for part in self.parts]
        return [c.indices for c in found], [c.values for c in found]

    def encode(self, changes: Changes, versions: Versions) -> tuple[list[Header], torch.Tensor]:
        """Return the header of the message to each rank, and all messages in a row, uint8."""
        positions, values = self._pack.map(*self._lists(changes))
        edges = torch.tensor(self._send_starts, device=positions.device)
        cuts = torch.searchsorted(positions, edges).tolist()
        return encode(positions, values, cuts, self._send_starts, versions)

    def write_local(self, changes: Changes, weights: Weights) -> None:
        """Write what this rank needs of its own changes."""
        self._scatter(self._local, self._lists(changes), weights)

    def write(
        self,
        headers: Sequence[Header],
        messages: Sequence[torch.Tensor],
        versions: Versions,
        weights: Weights,
    ) -> None:
        """Check the messages of all senders, uint8, then write their changes.

        Raises CorruptDeltaError before anything is written.
        """
        changes = decode(headers, messages, self._dtype, self._receive_counts, versions)
        self._scatter(self._unpack, changes, weights)

    def _scatter(
        self,
        table: ChangeTable,
        changes: tuple[list[torch.Tensor], list[torch.Tensor]],
        weights: Weights,
    ) -> None:
        names = self._destinations
        grown = table.scatter(*changes, [weights[name] for name in names])
        self.checksums_known &= grown is not None
        if grown is not None:
            self.checksums.update(dict(zip(names, grown.tolist(), strict=True)))


class DeltaTables:
    """The tables of one rank for deltas of a plan, made once for each size of group."""

    def __init__(self, mover: Mover) -> None:
        placements = mover.source.placements if mover.source else {}
        # Changes are numbered by position in a contiguous shard.
        strides = {n: contiguous_strides(p.local_shape) for n, p in placements.items()}
        self.builder = ExchangeBuilder(mover.plan, mover.rank, strides, mover.device)
        self._buckets = [bucket for bucket in mover.plan.buckets if covers(bucket)]
        self._known: dict[int, list[DeltaGroup]] = {}

    def groups(self, size: int) -> list[DeltaGroup]:
        """Return groups of up to `size` buckets each."""
        if size not in self._known:
            buckets = joined(self._buckets, size)
            self._known[size] = [DeltaGroup(self.builder, bucket) for bucket in buckets]
        return self._known[size]


class Increment:
    """The elements that changed between two versions of the weights, and how they move.

    size: the number of elements in a group (`group_size`).
    found: what changed in this rank's shards; None on a rank that only holds an engine.
    """

    covers = staticmethod(covers)

    def __init__(
        self, tables: DeltaTables, versions: Versions, size: int, found: Found | None
    ) -> None:
        self._tables, self._versions = tables, versions
        self._groups = tables.groups(size)
        self._changes = found and found.changes
        self.num_bytes = found.num_bytes if found else 0
        self._problem: CorruptDeltaError | None = None

    def move(self, transport: Transport, weights: Weights) -> None:
        """Write what changed into the engines' weights. Collective.

        weights: the tensors of this rank's engine; {} if it has no engine.
        Raises CorruptDeltaError, once everything has travelled, where a message was damaged or made
        from another version and was not applied.
        """
        for group in self._groups:
            group.checksums.clear()
        run_transfers(
            self._transfer(transport, group, f"delta {i} of {len(self._groups)}", weights)
            for i, group in enumerate(self._groups, 1)
        )
        transport.check(self._problem)

    def _transfer(
        self, transport: Transport, group: DeltaGroup, where: str, weights: Weights
    ) -> Iterator[None]:
        """Start the exchange of a group, yield, then wait for it and apply what has arrived."""
        guard, versions = transport.guard, self._versions
        guard.phase = f"packing {where}"
        leaving, outgoing = list[Header](), None
        if self._changes is not None:
            leaving, outgoing = group.encode(self._changes, versions)
        arriving, pending = self._post(transport, where, leaving, outgoing)
        if self._changes is not None:
            guard.phase = f"applying the local part of {where}"
            group.write_local(self._changes, weights)
        yield
        arrived = pending.wait()
        guard.phase = f"applying {where}"
        try:
            if arrived:
                group.write(arriving, arrived, versions, weights)
        except CorruptDeltaError as error:
            self._problem = error
        pending.release()

    def _post(
        self,
        transport: Transport,
        where: str,
        leaving: Sequence[Header],
        outgoing: torch.Tensor | None,
    ) -> tuple[list[Header], Pending]:
        """Start to move messages, whose sizes only their senders know: headers travel first.

        leaving: one header per rank; none on a rank that only holds an engine.
        Return the header of each message that arrives.
        """
        builder, receivers = self._tables.builder, transport.receivers
        rank, ranks = builder.rank, range(builder.plan.world_size)
        to = [r in (receivers or ranks) and r != rank for r in ranks] if leaving else []
        senders = ranks[: receivers.start] if receivers else ranks
        origins = [r != rank for r in senders] if rank in (receivers or ranks) else []
        told = None
        if leaving:
            rows = [leaving[r] for r in ranks if to[r]]
            told = torch.tensor(rows, dtype=torch.int64, device=builder.device).view(torch.uint8)
            told = told.view(-1)
        sizes = ([HEADER_BYTES * n for n in numbers] for numbers in (to, origins))
        heard = transport.post(f"the sizes of {where}", told, *sizes).wait()
        arriving = list[Header]()
        if heard:
            transport.progress.wait()
            numbers = torch.cat(heard).view(torch.int64).view(-1, len(Header._fields)).tolist()
            arriving = [Header(*row) for row in numbers]
        if origins and rank in senders:  # nothing is sent to itself
            arriving.insert(rank, leaving[rank])
        sent, received = ([h.num_bytes for h in headers] for headers in (leaving, arriving))
        return arriving, transport.post(where, outgoing, sent, received)

    def state_of(self, engine: WeightTarget, before: EngineState | None) -> EngineState:
        """Return the state of an engine after this has moved.

        before: its state before; None where it is not known.
        The tensors that the delta has written are not read: the growth of their checksums is known.
        If anything else has written to them meanwhile, the next comparison shows it.
        """
        if before is None or not all(group.checksums_known for group in self._groups):
            return EngineState.of(engine)
        growth = Counter[str]()
        for group in self._groups:
            growth.update(group.checksums)
        weights = engine.weights()
        known = {
            name: _int64(before.checksums[name] + growth[name])
            for name in without_aliases(weights)
            if name in growth and weights[name].is_contiguous()
        }
        return EngineState.of(engine, known)


class Deltas:
    """The `Deltas` of a `Resharder` (`hybridengine.sync.resharder`)."""

    def __init__(self, finder: ChangeFinder, mover: Mover) -> None:
        self.finder, self._tables = finder, DeltaTables(mover)

    @classmethod
    def of(cls, trainers: Trainers, mover: Mover, *, local: bool) -> Deltas | None:
        """As `find_changes`, whose arguments it takes and whose errors it raises."""
        finder = find_changes(trainers, mover.plan, local=local)
        return None if finder is None else cls(finder, mover)

    @property
    def remembers(self) -> bool:
        return not self.finder.is_paused

    @property
    def changed(self) -> float | None:
        return self.finder.changed

    def find(self, allowed: bool, base: int, version: int) -> Increment | None:
        found = self.finder.find(allowed)
        if found is None:
            return None
        return Increment(self._tables, Versions(base, version), group_size(found.share), found)


def joined(buckets: Sequence[Bucket], size: int) -> Iterator[Bucket]:
    """Yield buckets with the content of up to `size` buckets of equal treatment.

    A source that lies in one of them is one chunk there.
    """

    def treatment(bucket: Bucket) -> tuple:
        return str(bucket.engine_dtype), bucket.merged

    total = Counter(name for bucket in buckets for name, _ in bucket.chunks)
    for _, alike in itertools.groupby(sorted(buckets, key=treatment), key=treatment):
        members = list(alike)
        for first in range(0, len(members), size):
            group = members[first : first + size]
            chunks = [pair for bucket in group for pair in bucket.chunks]
            count = Counter(name for name, _ in chunks)
            if not group[0].merged:  # a slice is visited once, not once for each part of it
                whole = {name for name in count if count[name] == total[name]}
                chunks = [pair for pair in chunks if pair[0] not in whole]
                chunks += [(name, Chunk()) for name in count if name in whole]
            yield replace(group[0], chunks=chunks)


def without_aliases(weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield the tensors whose storage no other one uses, as tied weights do."""
    uses = Counter(tensor.untyped_storage().data_ptr() for tensor in weights.values())
    for name, tensor in weights.items():
        if uses[tensor.untyped_storage().data_ptr()] == 1:
            yield name


def _int64(value: int) -> int:
    """Return the signed number of 64 bits that is equal modulo 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
