"""What the processes of this user's runs are doing, in files that `doctor --attach` reads.

Every guard of collectives has a file in a private folder in shared memory, which no slow disk holds
up. It is overwritten at every phase, in some microseconds, and removed at the end of the process.
Files are data: JSON of one type, of processes of this user on this machine.
"""

from __future__ import annotations

import atexit
import itertools
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

__all__ = ["Activity", "Comparison", "Record", "read_records", "request_verify"]

_MAX_MISMATCHES = 20  # listed in a file
_VERIFY = "verify"  # suffix of a request
_SHARED_MEMORY, _TEMPORARY = Path("/dev/shm"), Path("/tmp")
_READS, _READ_PAUSE_S = 5, 0.02
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
        folder = _private_folder(create=True)
        if folder is None:
            return
        self._request = folder / f"{pid}.{_VERIFY}"
        if (number := next(_numbers)) == 0:
            _remove_stale(folder)
        path = folder / f"{pid}.{number}"
        with suppress(OSError):
            path.unlink(missing_ok=True)  # of an earlier process with this number
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            atexit.register(_remove, path, pid)

    def join(self, world: str) -> None:
        """Add an identifier that other processes have as well."""
        if world and world not in self.record.worlds:
            self.record.worlds.append(world)

    def enter(self, place: str) -> None:
        """Record what this process does now; it waits for nobody."""
        self._set(place, "", "", ())

    @contextmanager
    def in_collective(
        self, place: str, key: str, world: str, ranks: Iterable[str] = ()
    ) -> Iterator[None]:
        """Record, while open, that this process waits for `world` in the collective `key`.

        ranks: the names of the ranks that take part; none: all ranks of `world`.
        """
        before = self._waits
        self._set(place, key, world, tuple(ranks))
        try:
            yield
        finally:
            self._set(self.record.place, *before)

    @contextmanager
    def waiting_for(self, *names: str) -> Iterator[None]:
        """Record, while open, that this process waits for these ranks or engines."""
        before = self._waits
        self._set(self.record.place, *before[:2], names)
        try:
            yield
        finally:
            self._set(self.record.place, *before)

    @property
    def _waits(self) -> tuple[str, str, tuple[str, ...]]:
        return self.record.collective, self.record.world, self.record.waits_for

    def _set(self, place: str, collective: str, world: str, waits_for: tuple[str, ...]) -> None:
        record = self.record
        record.place, record.collective, record.world = place, collective, world
        record.waits_for, record.since = waits_for, time.time()
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


def read_records() -> list[Record]:
    """Return the records of this user's running processes; remove files of those that ended."""
    folder = _private_folder(create=False)
    records = []
    for path in sorted(folder.iterdir()) if folder is not None else ():
        pid, _, number = path.name.partition(".")
        if not (pid.isdigit() and number.isdigit()):
            continue
        record = _read(path)
        if record is not None and record.pid == int(pid) and _is_running(record):
            records.append(record)
    if folder is not None:
        _remove_stale(folder)
    return records


def _remove_stale(folder: Path) -> None:
    """Remove the files of processes that were killed."""
    for path in folder.iterdir():
        pid = path.name.partition(".")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            path.unlink(missing_ok=True)


def request_verify(pid: int) -> None:
    """Request that the next sync of a process compare the engines with the trainers."""
    if (folder := _private_folder(create=False)) is not None:
        (folder / f"{pid}.{_VERIFY}").touch(0o600)


def _read(path: Path) -> Record | None:
    """Read a file; the process may be writing to it just now."""
    for _ in range(_READS):
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(path.read_bytes(), type=Record)
        time.sleep(_READ_PAUSE_S)
    return None


def _is_running(record: Record) -> bool:
    """Return whether the process of a record runs; its number may be another one's now."""
    try:
        process = psutil.Process(record.pid)
        return (
            process.create_time() <= record.started + 1 and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False


def _private_folder(create: bool) -> Path | None:
    """Return this user's folder; None where there is none that is only this user's."""
    base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else _TEMPORARY
    folder = base / f"hybridengine-{os.getuid()}"
    try:
        if create:
            with suppress(FileExistsError):
                folder.mkdir(0o700)
        found = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return folder if is_own and not found.st_mode & 0o077 else None


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)
