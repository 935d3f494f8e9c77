"""strided_copy: copy a table of strided slices between two lists of tensors, with a cast.

The weight reshard packs, unpacks and copies locally with it: one launch whatever the number of
slices, with the cast (float32 to bfloat16, say) in the same pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _check as check
from ._backend import choose_backend, native, register_backends
from ._library import custom_op

register_backends("strided_copy", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

TABLE_COLUMNS = 16


class CopyTable:
    """A table of slices for repeated copies: checked once and, on CUDA, uploaded once.

    `copy` is `strided_copy` with `table` (see there for the columns and the errors) between tensors
    on `device`. A copy between the same addresses as the one before is a single launch, so it can
    be captured in a CUDA graph. Use a table on one stream only.
    """

    def __init__(self, table: Tensor, device: torch.device) -> None:
        self._rows = len(table)
        if choose_backend("strided_copy", device) == "reference":
            self._copy = functools.partial(_reference, table)
        else:
            self._copy = native().CopyTable(table).copy

    def __len__(self) -> int:
        return self._rows

    def copy(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        if self._rows:
            self._copy(sources, destinations)


def strided_copy(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    table: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Copy every slice of `table` from its source into its destination, in place.

    Args:
        sources: tensors of one dtype on one device.
        destinations: tensors of one dtype on that device; they are written.
        table: [P, 16] int64 on the CPU. A row is (src_index, dst_index, src_offset, dst_offset,
            size[4], src_stride[4], dst_stride[4]), in elements counted from the first element of
            the tensor; unused leading dimensions have size 1 and stride 0. Destination slices
            must not overlap. An empty table and rows of size 0 copy nothing. On a CPU, adjacent
            rows that read the same elements in the same order share their reads and casts.
        backend: `cpp`, `cuda` or `reference`; None takes the best one.

    Values are cast as by `tensor.to()` (float32 to bfloat16: round to nearest even); float64,
    float32, float16 and bfloat16 cast to each other, any other dtype only copies to itself.

    Raises:
        IndexError: a row names a tensor that is not there or reaches outside its storage.
        ValueError: a wrong table, mixed dtypes or devices, or a cast that does not exist.

    Examples:
        >>> row = [0, 0, 2, 0] + [1, 1, 2, 2] + [0, 0, 4, 1] + [0, 0, 2, 1]
        >>> source, out = torch.arange(8.0), torch.empty(4, dtype=torch.bfloat16)
        >>> strided_copy([source], [out], torch.tensor([row]))
        >>> out.tolist()
        [2.0, 3.0, 6.0, 7.0]
    """
    sources, destinations = list(sources), list(destinations)
    named = {f"sources[{i}]": tensor for i, tensor in enumerate(sources)}
    named |= {f"destinations[{i}]": tensor for i, tensor in enumerate(destinations)}
    check.same_device("strided_copy", **named)
    _strided_copy(sources, destinations, table.contiguous(), backend)


@custom_op("hybridengine::strided_copy", mutates_args={"destinations"})
def _strided_copy(
    sources: list[Tensor], destinations: list[Tensor], table: Tensor, backend: str | None
) -> None:
    device = sources[0].device if sources else torch.device("cpu")
    if choose_backend("strided_copy", device, backend) == "reference":
        _reference(table, sources, destinations)
    else:
        native().strided_copy(sources, destinations, table)


@_strided_copy.register_fake
def _() -> None:
    return None


def _reference(table: Tensor, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copy with as_strided on both sides and copy_: the specification."""
    sides = (("sources", sources, 0, 2, 8), ("destinations", destinations, 1, 3, 12))
    pairs = []
    for number, row in enumerate(table.tolist()):
        size = row[4:8]
        if 0 in size:
            continue
        views = []
        for name, tensors, which, at, steps in sides:
            index, offset, stride = row[which], row[at], row[steps : steps + 4]
            where = f"strided_copy: row {number}"
            if not 0 <= index < len(tensors):
                raise IndexError(f"{where} names {name}[{index}], but there are {len(tensors)}")
            if offset < 0 or min(stride) < 0 or min(size) < 0:
                raise IndexError(
                    f"{where} has offset {offset}, sizes {size} and strides {stride} in "
                    f"{name}[{index}]; they must not be negative"
                )
            tensor = tensors[index]
            start = tensor.storage_offset()
            last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            available = tensor.untyped_storage().nbytes() // tensor.element_size() - start
            if last >= available:
                raise IndexError(
                    f"{where} reaches element {last} of {name}[{index}], which has {available} "
                    "elements from its start"
                )
            views.append(tensor.as_strided(size, stride, start + offset))
        pairs.append(views)
    for source, destination in pairs:
        destination.copy_(source)
