"""Masks of changed elements, and the (index, value) of the elements that they mark.

A mask has one bit per element, int32 [ceil(numel / 32)]: element i is bit i % 32 of entry i // 32.
Its size does not depend on what changes: no capacity to choose, and no host synchronization to
learn a count while marking. `mark_changed_` compares with what was sent; `take_changed` reads the
masks, and of the marked tensors the changed elements only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import _check as check
from ._backend import choose_backend, native, register_backends
from ._per_token import unit_inner_stride

register_backends("take_changed", cpu=("cpp", "reference"), cuda=("cuda", "reference"))
register_backends("mark_changed_", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

ENGINE_DTYPES = (torch.bfloat16, torch.float16)
_OP = "take_changed"
_MAX_INT32_NUMEL = 2**31
_CHUNK = 1 << 22  # elements that the reference casts at a time


class Changed(NamedTuple):
    """Some elements of a tensor.

    indices: int32 or int64 [K], ascending: positions in its contiguous order.
    values: bfloat16 or float16 [K].
    """

    indices: Tensor
    values: Tensor


def change_mask(tensor: Tensor) -> Tensor:
    """Return a mask for `tensor` on its device that marks no element."""
    return torch.zeros(-(-tensor.numel() // 32), dtype=torch.int32, device=tensor.device)


def mark_changed_(
    current: Tensor, sent: Tensor, mask: Tensor, *, backend: str | None = None
) -> None:
    """Set `sent` to `current` in its dtype; add the elements whose bits change by that to `mask`.

    One pass over the memory, which writes only where something changed.

    Args:
        current: [N], floating point.
        sent: contiguous [N] of bfloat16 or float16 on the same device; it is written.
        mask: the result of `change_mask`.
        backend: `cpp`, `cuda` or `reference`; None takes the best one.

    Raises:
        ValueError: other shapes, dtypes or devices.

    Examples:
        >>> sent = torch.zeros(4, dtype=torch.bfloat16)
        >>> mask = change_mask(sent)
        >>> mark_changed_(torch.tensor([0.0, 2.0, 0.0, 3.0]), sent, mask)
        >>> indices, values = take_changed([mask], [sent])[0]
        >>> indices.tolist(), values.tolist()
        ([1, 3], [2.0, 3.0])
    """
    op = "mark_changed_"
    check.same_device(op, current=current, sent=sent, mask=mask)
    check.untransformed(op, current=current, sent=sent, mask=mask)
    check.contiguous(op, sent=sent, mask=mask)
    current = current.contiguous()
    if choose_backend(op, sent.device, backend) != "reference":
        native().mark_changed(current, sent, mask)
        return
    check.floats(op, current=current)
    check.dtype(op, "sent", sent, ENGINE_DTYPES)
    check.dtype(op, "mask", mask, (torch.int32,))
    check.shape(op, "mask", mask, "M", {})
    if current.shape != sent.shape or current.dim() != 1 or mask.numel() != -(-len(sent) // 32):
        raise ValueError(
            f"{op}: current has shape {tuple(current.shape)}, sent {tuple(sent.shape)} "
            f"and mask {tuple(mask.shape)}; expected two vectors of one size, and its mask."
        )
    for start in range(0, len(sent), _CHUNK):
        then = sent[start : start + _CHUNK]
        now = current[start : start + _CHUNK].to(sent.dtype)
        differ = now.view(torch.int16) != then.view(torch.int16)
        mark_(mask[start // 32 : -(-(start + len(now)) // 32)], differ)
        then.copy_(now)


def take_changed(
    masks: Sequence[Tensor],
    sources: Sequence[Tensor],
    *,
    max_share: float = 1.0,
    backend: str | None = None,
) -> list[Changed] | None:
    """Return (indices, values) of the elements that each mask marks, and clear the masks.

    The result is in ascending order and does not depend on the number of threads. The number of
    marked elements is read by the host, once for all tensors; nothing larger than the result is
    allocated.

    Args:
        masks: one per source, from `change_mask`.
        sources: contiguous tensors of one dtype, bfloat16 or float16, on one device.
        max_share: if a larger share of all elements is marked, None is returned, so that the result
            takes at most `max_share` times 6 (int32 and 16 bits) bytes of an element.
        backend: `cpp`, `cuda` or `reference`; None takes the best one.

    Returns:
        For each source the marked positions (int64 if a source has more than 2^31 elements) and the
        present values; views of two tensors.

    Raises:
        ValueError: wrong dtypes, sizes, strides or devices.

    Examples:
        >>> weight = torch.arange(40.0).bfloat16()
        >>> mask = change_mask(weight)
        >>> mask[0] = 0b110
        >>> take_changed([mask], [weight])[0].values.tolist()
        [1.0, 2.0]
    """
    masks, sources = list(masks), list(sources)
    check.number(_OP, "max_share", max_share, at_least=0, at_most=1)
    named = {f"sources[{i}]": tensor for i, tensor in enumerate(sources)}
    check.same_device(_OP, **named, **{f"masks[{i}]": mask for i, mask in enumerate(masks)})
    check.untransformed(_OP, masks=masks, sources=sources)
    if len(masks) != len(sources):
        raise ValueError(
            f"{_OP}: there are {len(masks)} masks and {len(sources)} sources; expected one each."
        )
    if not sources:
        return []
    limit = max_share * sum(source.numel() for source in sources)
    if choose_backend(_OP, sources[0].device, backend) == "reference":
        return _reference(masks, sources, limit)
    return _take(masks, sources, limit)


def _take(masks: list[Tensor], sources: list[Tensor], limit: float) -> list[Changed] | None:
    ends, counts = _count(masks, [source.numel() for source in sources])
    if sum(counts) > limit:
        for mask in masks:
            mask.zero_()
        return None
    indices, values = native().take_changed(masks, sources, ends, sum(counts))
    return list(map(Changed, indices.split(counts), values.split(counts)))


def _count(masks: list[Tensor], numels: list[int]) -> tuple[Tensor, list[int]]:
    """Return where each chunk's changes end among those of all chunks, and counts per tensor."""
    extension = native()
    ends = extension.count_changed(masks, numels).cumsum(0)
    last_chunks = list(accumulate(-(-n // extension.tensor_chunk) for n in numels))
    totals = np.append(0, ends.cpu().numpy())[last_chunks]
    return ends, np.diff(totals, prepend=0).tolist()


def marks(mask: Tensor, numel: int) -> Tensor:
    """Return bool [numel]: the elements that `mask` marks."""
    bit = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=mask.device)
    return (unit_inner_stride(mask).view(torch.uint8)[:, None] & bit).flatten()[:numel] != 0


def mark_(mask: Tensor, changed: Tensor) -> None:
    """Add the elements that are True in `changed` (bool, any shape) to `mask`."""
    flat = changed.flatten().to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, 32 * mask.numel() - flat.numel())).view(-1, 8)
    bit = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=mask.device)
    mask |= (padded * bit).sum(1, dtype=torch.uint8).view(torch.int32)


def _reference(masks: list[Tensor], sources: list[Tensor], limit: float) -> list[Changed] | None:
    """Find the set bits with `nonzero`: the specification."""
    wide = any(source.numel() > _MAX_INT32_NUMEL for source in sources)
    found = []
    for i, (mask, source) in enumerate(zip(masks, sources, strict=True)):
        check.dtype(_OP, f"masks[{i}]", mask, (torch.int32,))
        check.dtype(_OP, f"sources[{i}]", source, ENGINE_DTYPES)
        check.contiguous(_OP, **{f"masks[{i}]": mask, f"sources[{i}]": source})
        if mask.numel() != -(-source.numel() // 32):
            raise ValueError(
                f"{_OP}: masks[{i}] has {mask.numel()} entries; expected "
                f"{-(-source.numel() // 32)} for a source of {source.numel()} elements: make it "
                "with change_mask()."
            )
        found.append(marks(mask, source.numel()).nonzero().flatten())
        mask.zero_()
    if sum(map(len, found)) > limit:
        return None
    return [
        Changed(indices.to(torch.int64 if wide else torch.int32), source.flatten()[indices])
        for indices, source in zip(found, sources, strict=True)
    ]
