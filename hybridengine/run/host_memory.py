"""The memory of this machine, or of the control group (container) that this process is in."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def total_memory() -> float:
    """Return the bytes of memory that there are."""
    total = float(psutil.virtual_memory().total)
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no control group, or "max": without a limit
            total = min(total, float((_CGROUP / limit).read_text()))
    return total


def free_memory() -> float:
    """Return the bytes of memory that are free."""
    free = float(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        limit, used = ((_CGROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        free = min(free, float(limit) - float(used))
    return free
