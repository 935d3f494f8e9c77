"""Work whose errors all ranks raise together, so that none waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from hybridengine.errors import ModelError

T = TypeVar("T")


def run_on_all_ranks(
    fn: Callable[[], T],
    error_type: type[Exception],
    doing: str = "",
    group: dist.ProcessGroup | None = None,
) -> T:
    """Return `fn()`. If it fails on any rank, raise `error_type` on all of them. Collective.

    The message names each rank that failed and its error. doing: what failed, its first words.
    group: of all ranks; None: the default group.
    """
    error: Exception | None = None
    try:
        value = fn()
    except Exception as caught:
        error = caught
    raise_on_all_ranks(error, error_type, doing, group)
    return value


def raise_on_all_ranks(
    error: Exception | str | None,
    error_type: type[Exception],
    doing: str = "",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise `error_type` on every rank if any rank has an error. Collective."""
    text = _text(error, error_type) if isinstance(error, Exception) else error
    group = group or dist.group.WORLD
    assert group is not None
    texts: list[str | None] = [None] * group.size()
    dist.all_gather_object(texts, text, group)
    first: dict[str, int] = {}  # the same error of several ranks is reported once
    for rank, found in enumerate(texts):
        if found is not None:
            first.setdefault(found, rank)
    if first:
        start = f"{doing} failed " if doing else ""
        message = start + "; ".join(f"on rank {rank}: {found}" for found, rank in first.items())
        raise error_type(message) from (error if isinstance(error, Exception) else None)


def _text(error: Exception, expected: type[Exception]) -> str:
    """Return the message of an error; with its type, unless it is a ValueError or `expected`."""
    if isinstance(error, (ValueError, expected)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def host_device() -> torch.device:
    """Return the device of small tensors that all ranks agree on.

    The CPU where the default group has a CPU backend: its collectives wait on the host, so that a
    lost rank is an error there. Else the group's own device.
    """
    group = dist.distributed_c10d._get_default_group()
    return min(group._device_types, key=lambda device: device.type != "cpu")


def run_on_rank0(fn: Callable[[], T], doing: str) -> T | None:
    """Return `fn()` on rank 0, None elsewhere. If it fails, raise ModelError on all. Collective."""
    is_main = dist.get_rank() == 0
    return run_on_all_ranks(lambda: fn() if is_main else None, ModelError, doing)


def broadcast_from_rank0(value: T) -> T:
    """Return rank 0's picklable `value` on every rank. Collective."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
