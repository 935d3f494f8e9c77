"""The folder of a run: its lock, the phase of each rank, and how the rank ended.

Phases go to `<run>/.status/rank_<rank>.json`, so that the phase of a killed rank is known. Errors
go to the error record of torch's elastic launcher, which both `launch_ranks` and torchrun read.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hybridengine.run.errors import ConfigError, OutputError
from hybridengine.run.failures import RankReport
from hybridengine.run.storage import atomic_file


@dataclass(frozen=True)
class RankStatus:
    rank: int
    pid: int
    phase: str
    step: int
    time: float  # seconds since the epoch, of this entry
    end: str = ""  # "finished", or "stopped" by a signal after a checkpoint; "" if neither
    role: str = ""  # "trainer", "critic" or "engine 0", where ranks have roles


class PhaseStatus:
    """Writes the status of rank `rank` at every phase and at the end of its work."""

    def __init__(self, dir: str | Path, rank: int, role: str = "") -> None:
        self._current = RankStatus(rank, os.getpid(), "starting", 0, time.time(), role=role)
        self._file = Path(dir) / ".status" / f"rank_{rank}.json"
        self._write(self._current)

    def enter(self, phase: str, step: int) -> None:
        self._write(replace(self._current, phase=phase, step=step, time=time.time()))

    def end(self, how: str) -> None:
        """Record the end of this rank's work: "finished", or "stopped" before the last step."""
        self._write(replace(self._current, end=how, time=time.time()))

    def _write(self, status: RankStatus) -> None:
        self._current = status
        with suppress(OutputError), atomic_file(self._file) as temporary:  # it is only for messages
            temporary.write_text(json.dumps(asdict(status)))


def read_status(dir: str | Path) -> dict[int, RankStatus]:
    """Return the last phase that each rank entered, by rank; empty before the first."""
    found = {}
    for file in sorted((Path(dir) / ".status").glob("rank_*.json")):
        status = RankStatus(**json.loads(file.read_text()))
        found[status.rank] = status
    return found


def clear_status(dir: str | Path) -> None:
    """Remove the status of an earlier run in the same folder."""
    shutil.rmtree(Path(dir) / ".status", ignore_errors=True)


def write_error_record(reason: str, cause: RankReport | None = None, stack: str = "") -> None:
    """Write why this rank ends, in the format of `torch.distributed.elastic` error records.

    cause: the report of the other rank that is the cause; default: this rank is.
    stack: the text that torchrun prints for this rank; default: `reason`.
    Does nothing if no elastic launcher has started this process, or if the file cannot be written.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    now = time.time()
    order = int(now) + (cause is not None)  # torchrun calls the earliest one the root cause
    extra: dict[str, Any] = {"py_callstack": stack or reason, "timestamp": str(order)}
    extra |= {"time": now, "cause": None if cause is None else asdict(cause)}
    with suppress(OSError, OutputError), atomic_file(Path(file)) as temporary:
        temporary.write_text(json.dumps({"message": {"message": reason, "extraInfo": extra}}))


@contextmanager
def run_lock(dir: str | Path) -> Iterator[None]:
    """Hold an exclusive lock on `<dir>/.lock`: one run at a time in a folder.

    The launcher holds it, or under torchrun rank 0. The operating system releases it when the
    process ends, so no stale lock remains.

    Raises ConfigError if another process holds it; the message names its pid, host and start.
    """
    file = Path(dir) / ".lock"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held = file.open("a+b", buffering=0)  # "w" would empty it before the lock is ours
    except OSError as error:
        raise ConfigError(
            f"trainer.default_local_dir {str(file.parent)!r} cannot be written: {error}"
        ) from None
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.seek(0)
            raise ConfigError(_in_use(file.parent, held.read().decode())) from None
        except OSError as error:  # a file system without locks
            print(
                f"warning: {file} cannot be locked ({error}); do not start a second run in "
                "its folder",
                file=sys.stderr,
            )
        started = datetime.now().isoformat(sep=" ", timespec="seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
        with suppress(OSError):  # a full disk: the lock is held all the same
            held.truncate(0)
            held.write(json.dumps(holder).encode())
        yield


def _in_use(dir: Path, written: str) -> str:
    try:
        holder = json.loads(written)
        who = f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
    except (ValueError, KeyError, TypeError):  # it has only just taken the lock
        who = "another process"
    return (
        f"another run is using {str(dir)!r} ({who}); wait for it, stop it, or set another "
        "trainer.default_local_dir"
    )
