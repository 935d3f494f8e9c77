"""Wait for what other processes write to a store; the store gives no notice of a write."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

_SHORT_S, _LONG_S, _GROWTH = 1e-3, 2e-2, 1.1  # between two looks

T = TypeVar("T")


def wait_for(read: Callable[[], T | None], check: Callable[[], None] = lambda: None) -> T:
    """Return the first result of `read` that is not None.

    check: called between two tries; raises when there is nothing to wait for any more.
    """
    pause = _SHORT_S
    while (value := read()) is None:
        check()
        time.sleep(pause)
        pause = min(_GROWTH * pause, _LONG_S)
    return value


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
