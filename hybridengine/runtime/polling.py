"""Wait for what other processes write to a store, which tells nobody of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

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
