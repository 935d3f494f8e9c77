"""Memory of the host: of this machine or its control group (container), and limits on a block.

Reward workers import this module: it needs only the standard library until memory is asked for.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def total_memory() -> float:
    """Return the bytes of memory that there are."""
    import psutil

    total = float(psutil.virtual_memory().total)
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no control group, or "max": without a limit
            total = min(total, float((_CGROUP / limit).read_text()))
    return total


def free_memory() -> float:
    """Return the bytes of memory that are free."""
    import psutil

    free = float(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        limit, used = ((_CGROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        free = min(free, float(limit) - float(used))
    return free


@contextmanager
def memory_limit(extra_bytes: int) -> Iterator[None]:
    """Limit the address space of this process to `extra_bytes` more than it has.

    Allocating more is a MemoryError. No effect where there is no /proc (no Linux).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_address_limit(extra_bytes, soft, hard), hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_limit(extra_bytes: int, soft: int, hard: int) -> int:
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return soft
    others = (limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)
    return min([used + extra_bytes, *others])
