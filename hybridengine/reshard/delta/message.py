"""A delta on its way: the changes that one rank sends to another, as bytes.

The changes of a sender for a receiver are numbered by their position in the order in which a dense
sync would send all elements. A message is the new values, 16 bits each, then the gaps between the
positions (`kernels.delta.gaps`). Its header travels before it, and says which versions it connects.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hybridengine.kernels.delta import decode_gaps, encode_gaps
from hybridengine.sharding.checksums import bit_checksums


class Header(NamedTuple):
    """What a receiver knows before the message arrives; all zero but the versions for no changes.

    base_version: of the engine that the delta applies to. version: after it.
    gap_width: bytes of a field of the gaps. gap_bytes: of all gaps. checksum: of the message.
    """

    base_version: int
    version: int
    num_changes: int
    gap_width: int
    gap_bytes: int
    checksum: int

    @property
    def num_bytes(self) -> int:
        """The size of the message, even so that the next one is aligned for its values."""
        size = 2 * self.num_changes + self.gap_bytes
        return size + size % 2


class CorruptDeltaError(ValueError):
    """A message does not match its header, or its header does not match the engine."""


def encode(
    positions: torch.Tensor, values: torch.Tensor, start: int, base_version: int, version: int
) -> tuple[Header, torch.Tensor]:
    """Return the header and the message, uint8, of changes at ascending positions from `start`."""
    if not len(positions):
        empty = torch.empty(0, dtype=torch.uint8, device=positions.device)
        return Header(base_version, version, 0, 1, 0, 0), empty
    gaps, width = encode_gaps(positions, start)
    header = Header(base_version, version, len(positions), width, len(gaps), 0)
    message = torch.empty(header.num_bytes, dtype=torch.uint8, device=positions.device)
    message[: 2 * header.num_changes] = values.view(torch.uint8)
    message[2 * header.num_changes : 2 * header.num_changes + len(gaps)] = gaps
    message[2 * header.num_changes + len(gaps) :] = 0
    (checksum,) = bit_checksums([message])
    return header._replace(checksum=checksum), message


def decode(
    header: Header, message: torch.Tensor, dtype: torch.dtype, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (positions int64 in [start, end), values of `dtype`) of a message.

    Raises CorruptDeltaError for a message that is not the one its header describes.
    """
    if header.num_changes and bit_checksums([message]) != [header.checksum]:
        raise CorruptDeltaError("its checksum differs from that of its sender")
    values = message[: 2 * header.num_changes].view(dtype)
    gaps = message[2 * header.num_changes : 2 * header.num_changes + header.gap_bytes]
    try:
        return decode_gaps(gaps, header.gap_width, start, end, header.num_changes), values
    except ValueError as error:
        raise CorruptDeltaError(str(error)) from error
