"""Which phase each rank is in, on disk: what is left to read after a rank is killed."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hybridengine.storage import atomic_file

__all__ = ["PhaseStatus", "RankStatus", "clear_status", "read_status"]


@dataclass(frozen=True)
class RankStatus:
    rank: int
    pid: int
    phase: str
    step: int
    time: float  # seconds since the epoch, of this entry
    error: str = ""  # why the rank failed in that phase, if it did so by itself
    lost: int | None = None  # the other rank whose loss ended this one
    end: str = ""  # "finished", or "stopped" by a signal after a checkpoint; else it is cut short


class PhaseStatus:
    """Written by rank `rank` at every phase and failure, to `<dir>/.status/rank_<rank>.json`."""

    def __init__(self, dir: str | Path, rank: int) -> None:
        self._current = RankStatus(rank, os.getpid(), "starting", 0, time.time())
        self._file = Path(dir) / ".status" / f"rank_{rank}.json"
        self._write(self._current)

    def enter(self, phase: str, step: int) -> None:
        self._write(replace(self._current, phase=phase, step=step, time=time.time()))

    def fail(self, error: str) -> None:
        """Note that this rank failed in its phase, not for the loss of another one."""
        self._write(replace(self._current, error=error, time=time.time()))

    def lose(self, rank: int) -> None:
        """Note that this rank ends because it has lost `rank`."""
        self._write(replace(self._current, lost=rank, time=time.time()))

    def end(self, how: str) -> None:
        """Note that this rank has done all its work: "finished", or "stopped" before its time."""
        self._write(replace(self._current, end=how, time=time.time()))

    def _write(self, status: RankStatus) -> None:
        self._current = status
        with atomic_file(self._file) as temporary:
            temporary.write_text(json.dumps(asdict(status)))


def read_status(dir: str | Path) -> dict[int, RankStatus]:
    """The last phase that each rank entered, by rank; empty before the first."""
    found = {}
    for file in sorted((Path(dir) / ".status").glob("rank_*.json")):
        status = RankStatus(**json.loads(file.read_text()))
        found[status.rank] = status
    return found


def clear_status(dir: str | Path) -> None:
    """Forget an earlier run in the same folder."""
    for file in (Path(dir) / ".status").glob("rank_*.json"):
        file.unlink()
