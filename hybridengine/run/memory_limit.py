"""A limit of the memory that a block of code may take."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
