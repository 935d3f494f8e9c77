"""Work that rank 0 does for all, whose failure all ranks learn of instead of waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from hybridengine.errors import ModelError

__all__ = ["broadcast_from_rank0", "run_on_rank0"]

T = TypeVar("T")


def run_on_rank0(fn: Callable[[], T], doing: str) -> T | None:
    """`fn()` on rank 0, None elsewhere. All ranks call; all raise ModelError if rank 0 fails."""
    value, error = None, None
    if dist.get_rank() == 0:
        try:
            value = fn()
        except Exception as e:
            error = e
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    text = broadcast_from_rank0(None if error is None else f"{kind}{error}")
    if text is not None:
        raise ModelError(f"{doing} failed on rank 0: {text}") from error
    return value


def broadcast_from_rank0(value: T) -> T:
    """Rank 0's picklable `value`, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
