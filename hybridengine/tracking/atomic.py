"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_file"]


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary neighbour of `path` to write; it takes the name only if the block succeeds.

    The ending is kept, for writers that choose a format by it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
