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
from hybridengine.sync.buckets import Bucket
from hybridengine.sync.changes import Part, covers
from hybridengine.sync.source_class import Chunk
from hybridengine.sync.tables import ExchangeBuilder
from hybridengine.sync.transport import Header, Transport, run_transfers
from hybridengine.sync.weight_target import CorruptDeltaError, bit_checksums


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
            if (header.base, header.new) != versions:
                raise CorruptDeltaError(
                    f"it leads from version {header.base} to {header.new}, expected "
                    f"{versions.base} to {versions.new}"
                )
            if checksum != header.checksum:
                raise CorruptDeltaError("its checksum differs from that of its sender")
            middle = 2 * header.num_changes
            gaps = message[middle : middle + header.gap_bytes]
            count = header.num_changes
            positions.append(decode_gaps(gaps, header.gap_width, 0, counts[sender], count))
            values.append(message[:middle].view(dtype))
        except ValueError as error:
            raise CorruptDeltaError(
                f"the delta from rank {sender} was not applied: {error}"
            ) from error
    return positions, values


_BYTES_PER_CHANGE = 3  # of a message, where an element has 2
_STEP = 4  # sizes of groups are powers of it, so that few sets of tables are made

Changes = Mapping[Part, Changed]
Weights = Mapping[str, torch.Tensor]


def group_size(share: float) -> int:
    """Return of how many buckets the messages take about as much memory as two buckets.

    Examples:
        >>> [group_size(share) for share in (1 / 3, 0.1, 0.01, 0.001)]
        [4, 4, 64, 1024]
    """
    most = 2 * 2 / (_BYTES_PER_CHANGE * max(share, 1e-6))
    size = 1
    while size * _STEP <= most:
        size *= _STEP
    return size


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


class Delta:
    """Moves only those elements that changed, from the engine weights of one version to another.

    builder: of a rank whose shards are contiguous, because changes are numbered by position.
    """

    def __init__(self, builder: ExchangeBuilder) -> None:
        self._builder = builder
        self._buckets = [bucket for bucket in builder.plan.buckets if covers(bucket)]
        self._known: dict[int, list[DeltaGroup]] = {}

    def _groups(self, size: int) -> list[DeltaGroup]:
        """Return groups of up to `size` buckets each."""
        if size not in self._known:
            self._known[size] = [
                DeltaGroup(self._builder, bucket) for bucket in joined(self._buckets, size)
            ]
        return self._known[size]

    def run(
        self,
        transport: Transport,
        weights: Weights,
        changes: Changes | None,
        versions: Versions,
        size: int,
    ) -> Mapping[str, int] | None:
        """Write what changed into the engines' weights. Collective.

        Return engine tensor → by how much its `bit_checksum` has grown; None if it is not known.

        weights: the tensors of this rank's engine; {} if it has no engine.
        changes: the changes of this rank's shards; None if it has no shards.
        size: the number of elements in a group (`group_size`).
        Raises CorruptDeltaError, once everything has travelled, where a message was damaged or made
        from another version and was not applied.
        """
        self._problem: CorruptDeltaError | None = None
        groups = self._groups(size)
        for group in groups:
            group.checksums.clear()
        run_transfers(
            self._transfer(
                transport, group, f"delta {i} of {len(groups)}", weights, changes, versions
            )
            for i, group in enumerate(groups, 1)
        )
        transport.check(self._problem)
        if not all(group.checksums_known for group in groups):
            return None
        checksums = Counter[str]()
        for group in groups:
            checksums.update(group.checksums)
        return checksums

    def _transfer(
        self,
        transport: Transport,
        group: DeltaGroup,
        where: str,
        weights: Weights,
        changes: Changes | None,
        versions: Versions,
    ) -> Iterator[None]:
        """Start the exchange of a group, yield, then wait for it and apply what has arrived."""
        guard = transport.guard
        guard.phase = f"packing {where}"
        leaving, outgoing = group.encode(changes, versions) if changes is not None else ([], None)
        pending = transport.post_delta(where, leaving, outgoing)
        if changes is not None:
            guard.phase = f"applying the local part of {where}"
            group.write_local(changes, weights)
        yield
        arrived = pending.wait()
        guard.phase = f"applying {where}"
        try:
            if arrived:
                group.write(pending.headers, arrived, versions, weights)
        except CorruptDeltaError as error:
            self._problem = error
        pending.release()


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
