"""changed_elements: compare a tensor, cast, with what was sent, and list what changed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, native, register_backends
from ..changes import change_mask, take_changed

register_backends("changed_elements", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

_MAX_INT32 = 2**31 - 1
_CHUNK = 1 << 22  # elements that the reference casts at a time


class Changes(NamedTuple):
    """The K elements that changed.

    indices: int32 [K], int64 for tensors of more than 2^31 - 1 elements; ascending. values: the new
    ones, [K], in the dtype that was sent. num_changed: K. Where that is above the capacity, indices
    and values are empty, and on a GPU it is only one more than the capacity.
    """

    indices: Tensor
    values: Tensor
    num_changed: int


def changed_elements(
    current: Tensor, sent: Tensor, *, capacity: int | None = None, backend: str | None = None
) -> Changes:
    """Set `sent` to `current` in its dtype; return the elements whose bits change by that.

    One pass over the memory on a CPU, which writes only where something changed. It waits for a
    GPU, which has to report how many elements to return.

    Args:
        current: contiguous [N], floating point.
        sent: contiguous [N] of bfloat16 or float16 on the same device; it is written.
        capacity: the largest number of changes that are returned; None: any.
        backend: `cpp`, `cuda` or `reference`; None takes the best one.

    Raises:
        ValueError: other shapes, dtypes or devices.

    Example:
        >>> sent = torch.zeros(4, dtype=torch.bfloat16)
        >>> changed_elements(torch.tensor([0.0, 2.0, 0.0, 3.0]), sent)[:2]
        (tensor([1, 3], dtype=torch.int32), tensor([2., 3.], dtype=torch.bfloat16))
    """
    check.same_device("changed_elements", current=current, sent=sent)
    capacity = current.numel() if capacity is None else capacity
    wide = current.numel() > _MAX_INT32
    chosen = choose_backend("changed_elements", sent.device, backend)
    if chosen == "cpp":
        return Changes(*native().changed_elements(current, sent, capacity, wide))
    if chosen == "cuda":
        mask = change_mask(sent)
        native().mark_changed(current, sent, mask)
        taken = take_changed([mask], [sent], dtype=sent.dtype, max_share=_share(capacity, sent))
        if taken is None:
            empty = torch.empty(0, dtype=torch.int64 if wide else torch.int32, device=sent.device)
            return Changes(empty, sent[:0], capacity + 1)
        ((indices, values),) = taken
        return Changes(indices, values, len(indices))
    if current.shape != sent.shape or current.dim() != 1 or sent.element_size() != 2:
        raise ValueError(
            f"changed_elements: current has shape {tuple(current.shape)}, sent "
            f"{tuple(sent.shape)} and dtype {sent.dtype}; expected two vectors of one size, sent "
            "of bfloat16 or float16."
        )
    return _reference(current, sent, capacity, torch.int64 if wide else torch.int32)


def _share(capacity: int, sent: Tensor) -> float:
    return min(1.0, capacity / max(1, sent.numel()))


def _reference(current: Tensor, sent: Tensor, capacity: int, dtype: torch.dtype) -> Changes:
    found: list[Tensor] = []
    for start in range(0, current.numel(), _CHUNK):
        then = sent[start : start + _CHUNK]
        now = current[start : start + _CHUNK].to(sent.dtype)
        found.append((now.view(torch.int16) != then.view(torch.int16)).nonzero()[:, 0] + start)
        then.copy_(now)
    indices = torch.cat(found) if found else torch.empty(0, dtype=dtype, device=sent.device)
    count = indices.numel()
    if count > capacity:
        indices = indices[:0]
    return Changes(indices.to(dtype), sent[indices], count)
