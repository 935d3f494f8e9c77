"""The writes of this process to a disk, limited by their progress and not by their duration.

A disk may be slow: a write is waited for as long as it makes progress. The `RankMonitor` ends a
rank whose write makes none for `trainer.timeout_s`; other ranks may therefore wait for a write
without a limit of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Write", "active_writes", "note_progress", "writing_to"]

_POLL_S = 0.5
_active: list[Write] = []
_num_noted = 0


class Write:
    """A write that is under way; its thread observes its progress.

    Attributes:
        folder: the folder that is written.
        progressed: when it last made progress, of `time.monotonic`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.progressed = folder, time.monotonic()
        self._last: tuple[int, int] | None = None
        self._ended = threading.Event()

    def observe(self) -> None:
        """Compare with the last observation. Waits where the disk does not answer."""
        now = _num_noted, _num_bytes(self.folder)
        if now != self._last:
            self._last, self.progressed = now, time.monotonic()

    def run(self) -> None:
        """Observe the progress until `end`."""
        self.observe()
        while not self._ended.wait(_POLL_S):
            self.observe()

    def end(self) -> None:
        self._ended.set()


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Name what runs inside a write to `folder`, a file or folder that need not exist yet.

    Progress is that the bytes in `folder` change, or a call of `note_progress`.
    """
    write = Write(folder)
    _active.append(write)
    threading.Thread(target=write.run, name="write-progress", daemon=True).start()
    try:
        yield
    finally:
        write.end()
        _active.remove(write)


def active_writes() -> list[Write]:
    """Return the writes of this process that are under way."""
    return list(_active)


def note_progress() -> None:
    """Note progress that adds no bytes: of reading back, of checksums, of flushing."""
    global _num_noted
    _num_noted += 1


def _num_bytes(path: Path) -> int:
    total = 0
    with suppress(OSError):  # files are renamed meanwhile
        for file in [path, *path.rglob("*")]:
            with suppress(OSError):
                status = file.stat()
                total += status.st_size + status.st_blocks
    return total
