"""Waits for other ranks, and what rank 0 alone finds out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hybridengine.run.messages import broadcast_value, error_text, wait_for

T = TypeVar("T")


def wait_until(
    ready: Callable[[], T | None],
    timeout_s: float,
    what: str | Callable[[], str],
    is_writing: Callable[[], bool] = lambda: False,
) -> T:
    """Return the first value of `ready()` that is not None.

    what: is waited for, for the message.
    is_writing: whether the awaited rank waits for its disk; that time does not count.

    Raises DistError, a timeout, after timeout_s; the report of the failure then names where the
    other ranks are. Lost ranks are noticed by the rank's monitor.
    """
    deadline = time.monotonic() + timeout_s

    def check() -> None:
        nonlocal deadline
        now = time.monotonic()
        if is_writing():
            deadline = now + timeout_s
        elif now > deadline:
            awaited = what if isinstance(what, str) else what()
            raise dist.DistError(
                f"timed out after {timeout_s:g} s (trainer.timeout_s) of waiting for {awaited}"
            )

    return wait_for(ready, check)


def from_rank0(fn: Callable[[], T], expected: Any, error_type: type[Exception]) -> T:
    """Return on every rank what `fn` returns on rank 0; if it fails, raise `error_type` on all.

    Collective: one broadcast; rank 0 does not wait for the others. expected: see
    `all_gather_values`.
    """
    value: Any = None
    error = None
    if dist.get_rank() == 0:
        try:
            value = fn()
        except Exception as caught:
            error = caught
    own = value, error_text(error, error_type)
    value, text = broadcast_value(own, tuple[expected | None, str | None])
    if text is not None:
        raise error_type(f"on rank 0: {text}") from error
    result: T = value
    return result
