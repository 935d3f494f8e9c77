"""A delta on its way: the changes that one rank sends to another, as bytes.

The changes of a sender for a receiver are numbered by their position in the order in which a dense
sync would send all elements. A message is the new values, 16 bits each, then the gaps between the
positions (`kernels.delta.gaps`). Its header travels before it, and says which versions it connects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hybridengine.kernels.delta import decode_gaps, encode_gaps
from hybridengine.sync.checksums import bit_checksums
from hybridengine.sync.errors import CorruptDeltaError

_ALIGNMENT = 8  # bytes of a message: the next one is aligned for its values and its checksum


class Versions(NamedTuple):
    """The version of the engine's weights that a delta applies to, and the one that it makes."""

    base: int
    new: int


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
