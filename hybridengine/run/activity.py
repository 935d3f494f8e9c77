"""What the processes of this user's runs are, and are doing.

Every guard of collectives has a file in a private folder in shared memory, which no slow disk holds
up; `doctor --attach` reads it. It is overwritten at every phase, in some microseconds, and removed
at the end of the process. Files are data: JSON of one type, of processes of this user on this
machine.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

VERIFY = "verify"  # suffix of a request
_MAX_MISMATCHES = 20  # listed in a file
SHARED_MEMORY, _TEMPORARY = Path("/dev/shm"), Path("/tmp")
_numbers = itertools.count()


class Comparison(msgspec.Struct, frozen=True):
    """Checksums of the engine compared with those of the trainer, after the sync to `version`.

    different: (engine tensor, trained parameter), the first ones.
    count: the number of all slices that differ.
    """

    version: int
    different: tuple[tuple[str, str], ...]
    count: int


class Record(msgspec.Struct):
    """The state of one process in the collectives of one guard.

    name: the name of the rank, as shown to a person.
    started: when the record was made, in seconds since the epoch.
    since: when the process began what it is doing, in seconds since the epoch.
    worlds: identifiers that are common to the ranks of a world, or of a sync between worlds.
    place: the phase, and the operation that it is part of.
    collective: the collective in which it waits, equal on all ranks that wait in it; "": none.
    world: the world of the ranks that take part in the collective.
    waits_for: the names of the ranks or engines that it waits for, where it knows them.
    """

    pid: int
    name: str
    rank: int
    world_size: int
    started: float
    since: float
    worlds: list[str]
    place: str = "starting"
    collective: str = ""
    world: str = ""
    waits_for: tuple[str, ...] = ()
    compared: Comparison | None = None


class Activity:
    """The record of this process in the collectives of one guard, and its file.

    Nothing is written where there is no private folder.
    """

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        now, pid = time.time(), os.getpid()
        self.record = Record(pid, name, rank, world_size, now, now, [])
        self._file: int | None = None
        self._size = 0  # of the file
        folder = private_folder()
        if folder is None:
            return
        self._request = folder / f"{pid}.{VERIFY}"
        if (number := next(_numbers)) == 0:
            remove_stale(folder)
        path = folder / f"{pid}.{number}"
        with suppress(OSError):
            path.unlink(missing_ok=True)  # of an earlier process with this number
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            atexit.register(_remove, path, pid)

    def join(self, world: str) -> None:
        """Add an identifier that other processes have as well."""
        self.record.worlds = list(dict.fromkeys([*self.record.worlds, world]))

    def enter(self, place: str) -> None:
        """Record what this process does now; it waits for nobody."""
        self._set(place=place, collective="", world="", waits_for=())

    def in_collective(
        self, place: str, key: str, ranks: Iterable[str] = ()
    ) -> AbstractContextManager[None]:
        """Record, while open, that this process waits for others in the collective `key`.

        ranks: the names of those that take part; none: all ranks of the guard's world.
        """
        names, worlds = tuple(ranks), self.record.worlds
        world = worlds[0] if worlds and not names else ""
        return self._waiting(place=place, collective=key, world=world, waits_for=names)

    def waiting_for(self, *names: str) -> AbstractContextManager[None]:
        """Record, while open, that this process waits for these ranks or engines."""
        return self._waiting(waits_for=names)

    @contextmanager
    def _waiting(self, **changes: Any) -> Iterator[None]:
        record = self.record
        before = record.collective, record.world, record.waits_for
        self._set(**changes)
        try:
            yield
        finally:
            self._set(collective=before[0], world=before[1], waits_for=before[2])

    def _set(self, **changes: Any) -> None:
        for field, value in changes.items():
            setattr(self.record, field, value)
        self.record.since = time.time()
        self._write()

    def compared(self, version: int, mismatches: Sequence[tuple[int, str, str]]) -> None:
        """Record the slices that differ: (receiving rank, engine tensor, trained parameter)."""
        tensors = dict.fromkeys((tensor, source) for _, tensor, source in mismatches)
        different = tuple(tensors)[:_MAX_MISMATCHES]
        self.record.compared = Comparison(version, different, len(mismatches))
        self._write()

    def verify_requested(self) -> bool:
        """Return whether somebody has requested that the next sync be verified."""
        return self._file is not None and self._request.exists()

    def verify_begun(self) -> None:
        """Forget the request."""
        if self._file is not None:
            with suppress(OSError):
                self._request.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._file is None or os.getpid() != self.record.pid:  # a forked child
            return
        data = msgspec.json.encode(self.record)
        self._size = max(self._size, len(data))
        with suppress(OSError):
            os.pwrite(self._file, data.ljust(self._size), 0)  # spaces cover what was longer


def private_folder() -> Path | None:
    """Return this user's folder; None where there is none that is only this user's."""
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else _TEMPORARY
    folder = base / f"hybridengine-{os.getuid()}"
    try:
        folder.mkdir(0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return folder if is_own and not found.st_mode & 0o077 else None


def remove_stale(folder: Path) -> None:
    """Remove the files and folders of processes that were killed."""
    for path in folder.iterdir():
        pid = path.name.partition(".")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            with suppress(OSError):  # another process removes it, too
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


@functools.cache
def machine_id() -> str:
    """Identify the processes that can see each other in /proc; elsewhere unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown/{os.getpid()}"


def this_process() -> str:
    """Return an identifier of this process, for `process_state`."""
    return f"{machine_id()}|{os.getpid()}"


def machine_of(process: str) -> str:
    """Return the machine of a process: equal for those that can see each other in /proc."""
    return process.rpartition("|")[0]


def process_state(process: str) -> str:
    """Return "running", "stopped" or "ended"; "remote" for a process on another machine."""
    if machine_of(process) != machine_id():
        return "remote"
    try:
        status = psutil.Process(int(process.rpartition("|")[2])).status()
    except psutil.NoSuchProcess:
        return "ended"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "ended"
    return "stopped" if status == psutil.STATUS_STOPPED else "running"


def stopped_ranks(processes: Iterable[str]) -> str:
    """Return which processes, on this machine, are stopped; "" for none. processes: by rank."""
    stopped = (rank for rank, p in enumerate(processes) if process_state(p) == "stopped")
    return ", ".join(f"rank {rank} is stopped (SIGSTOP)" for rank in stopped)
