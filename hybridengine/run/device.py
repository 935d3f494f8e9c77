"""Identify a device; wait, under a deadline that names lost ranks, for what was enqueued on it.

A collective of NCCL is only enqueued: `work.wait()` makes the stream wait, not the host. Nothing on
the host would notice a lost rank, and a barrier over gloo would be passed before any data arrives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist

_LOOK_S = 2.0  # between two looks for a lost rank
_LIMIT_SHARE = 0.8  # of the group's timeout, at which NCCL's watchdog ends the process


class StreamPoint(Protocol):
    """A point of a stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the device has reached it."""


class Guard(Protocol):
    """The questions about other ranks that `CollectiveGuard` answers.

    phase: what this rank is doing, for messages.
    """

    phase: str

    def collective(
        self, phase: str, timeout_s: float | None = None
    ) -> AbstractContextManager[None]:
        """Raise CollectiveError if what runs inside fails because of another rank."""

    def lost_rank(self) -> object | None:
        """Return who has failed or ended, None if nobody is known to."""


class DeviceProgress:
    """The phases of an operation that this rank has enqueued on a device.

        work = dist.all_to_all_single(..., async_op=True)
        work.wait()
        progress.mark("exchanging bucket 1 of 7")
        progress.wait()

    guard: asks the other ranks when a phase is not finished in time.
    device: the device of the tensors.
    record: returns the current point of the device's stream, None where the host has already
      waited; default: an event on CUDA.
    limit_s: how long `wait` waits; default: 0.8 of the timeout of the process group.
    """

    def __init__(
        self,
        guard: Guard,
        device: torch.device,
        record: Callable[[], StreamPoint | None] | None = None,
        limit_s: float | None = None,
    ) -> None:
        self._guard, self._device, self._limit_s = guard, device, limit_s
        self._record = record or self._record_event
        self._marks: list[tuple[str, StreamPoint]] = []

    def _record_event(self) -> StreamPoint | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark(self, phase: str) -> None:
        """Everything that belongs to `phase` is now enqueued on the current stream."""
        if (completion := self._record()) is not None:
            self._marks.append((phase, completion))

    def wait(self) -> None:
        """Return when the device has finished every marked phase.

        Raises CollectiveError, which names the first unfinished phase and the rank at fault, soon
        after a rank has failed or ended, and after `limit_s`.
        """
        marks, self._marks = self._marks, []
        if not marks:
            return
        limit_s = self._limit_s or _LIMIT_SHARE * _timeout_s(self._device)
        started, next_look = time.monotonic(), _LOOK_S
        for phase, completion in marks:
            with self._guard.collective(phase):
                while not completion.query():
                    waited = time.monotonic() - started
                    if waited > limit_s:
                        raise dist.DistError(f"the device has not finished it after {limit_s:g} s")
                    if waited > next_look:
                        if lost := self._guard.lost_rank():
                            raise dist.DistError(str(lost))
                        next_look = waited + _LOOK_S
                    time.sleep(min(1e-2, 1e-4 + waited / 100))


def _timeout_s(device: torch.device) -> float:
    """Return the timeout of the default process group's collectives on `device`, in seconds."""
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(device).options._timeout.total_seconds()


def device_id(device: torch.device) -> str:
    """Return an identifier of a device, equal in all processes that use it."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.cuda.get_device_properties(device).uuid)
