"""Files and folders that are complete or absent, and the space for them.

A user's own files are never deleted.

`write_manifest` writes `complete.json`, which lists every file of a folder with its size and
checksum, after all of them are on the disk. Replacing or removing such a folder deletes only the
files listed there; anything else is moved to `previous-<n>/` next to it.

A disk may be slow: a write is waited for as long as it makes progress. The `RankMonitor` ends a
rank whose write makes none for `trainer.timeout_s`; other ranks may therefore wait for a write
without a limit of their own (`writing_to`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hybridengine.run.errors import ModelError, OutputError

MANIFEST = "complete.json"
_KEYS = {"files", "step", "score", "exported_from"}  # of all manifests, besides the checksum

Record = list[int]  # [bytes, CRC-32]

# Of writes to a disk that is full, over a quota or a limit, read-only or damaged.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)

_POLL_S = 0.5  # between two looks at the progress of a write
_active: list[Write] = []
_num_noted = 0
_PREVIOUS = re.compile(r"previous-(\d+)")


class StorageError(ValueError):
    """A folder that is incomplete or damaged; the message names the file and the reason."""


def file_records(folder: Path, names: Iterable[str] | None = None) -> dict[str, Record]:
    """Flush files in `folder` to the disk and return the size and CRC-32 of each.

    names: relative to `folder`; None: all files but the manifest.
    """
    selected = _files(folder) - {MANIFEST} if names is None else set(names)
    for name in selected:
        fsync_path(folder / name)
    return {n: [(folder / n).stat().st_size, _crc32(folder / n)] for n in sorted(selected)}


def write_manifest(folder: Path, records: Mapping[str, Record] | None = None, **extra: Any) -> None:
    """Make `folder` complete: list its files in the manifest, flush all of it to the disk.

    Files get the permissions of the umask (temporary files of writers have 0600).

    records: the records of all files, as `file_records` returns them; None: compute them.
    extra: further entries of the manifest.
    """
    records = file_records(folder) if records is None else records
    manifest, content = folder / MANIFEST, {**extra, "files": dict(records)}
    manifest.write_text(json.dumps({**content, "checksum": _checksum(content)}, indent=1))
    mode = manifest.stat().st_mode & 0o666
    for name in records:
        (folder / name).chmod(mode)
    fsync_path(manifest)
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        fsync_path(path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of `folder`; StorageError if there is none, or it is damaged.

    One of an older version has no checksum of its own.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        checksum = manifest.pop("checksum", None)
        if manifest.keys() - _KEYS or checksum not in (None, _checksum(manifest)):
            raise ValueError("its checksum differs from its content")
        for name, record in manifest["files"].items():
            if isinstance(record, int):
                raise StorageError("was written by an older version, without checksums")
            if len(record) != 2 or Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"malformed entry {name!r}")
    except FileNotFoundError:
        reason = f"has no {MANIFEST}: it was never completed"
        raise StorageError(reason if folder.is_dir() else "does not exist") from None
    except StorageError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StorageError(f"has a damaged {MANIFEST} ({error}); copy it again") from None
    return manifest


def find_damage(folder: Path, records: Mapping[str, Record], checksums: bool) -> str | None:
    """Describe the first difference between `records` and the files of `folder`, or return None.

    checksums: compare contents too, not only sizes.
    """
    for name, (size, crc32) in records.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or truncated, expected {size} bytes; copy it again"
        if checksums and _crc32(file) != crc32:
            return f"{name} is damaged: its checksum differs from the recorded one"
    return None


def find_foreign_file(folder: Path) -> str | None:
    """Return a file in `folder` that its manifest does not list, or None."""
    return min(_files(folder) - _own_files(folder), default=None)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise OutputError where a disk error, such as a full disk, ends the block.

    The operating system's message does not name the file that was written, nor the free space.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise OutputError(
            f"{str(path)!r} cannot be written: {error.strerror} ({free_space(path)})"
        ) from error


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to `path` to write; it is renamed if the block succeeds.

    The suffix is kept, for writers that choose a format by it. Raises OutputError as `writing`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        with writing(path):
            yield temporary
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(name: Path, **extra: Any) -> Iterator[Path]:
    """Yield a hidden folder next to `name` to write files into.

    If the block succeeds, it gets a manifest (with `extra`) and takes the name (`replace_folder`),
    else it is removed.
    """
    partial = name.with_name(f".{name.name}.partial")
    with writing_to(partial):
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            yield partial
            write_manifest(partial, **extra)
            replace_folder(partial, name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def replace_folder(written: Path, name: Path) -> None:
    """Rename a complete folder to `name`.

    An existing `name` is removed, or moved to `previous-<n>` if it contains files that this package
    did not write.
    """
    if name.is_dir() and find_foreign_file(name) is None:
        outgoing = name.with_name(f".{name.name}.replaced")
        if outgoing.exists():
            remove_folder(outgoing)
        name.rename(outgoing)
        written.rename(name)
        remove_folder(outgoing)
    else:
        if os.path.lexists(name):
            archive([name], name.parent)
        written.rename(name)
    fsync_path(name.parent)


def remove_folder(folder: Path) -> None:
    """Delete the files that the manifest of `folder` lists, and `folder` if it is then empty.

    Of a symbolic link, to the folder or inside it, only the link is removed.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    own = _own_files(folder)
    (folder / MANIFEST).unlink(missing_ok=True)  # first: a partly deleted folder is incomplete
    for name in own:
        parents = [folder / parent for parent in reversed(Path(name).parents)]
        link = next((parent for parent in parents[1:] if parent.is_symlink()), folder / name)
        link.unlink(missing_ok=True)
        note_progress()
    inner = sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True)
    for path in [*inner, folder]:
        if not any(path.iterdir()):
            path.rmdir()


def archive(paths: Iterable[Path], root: Path) -> Path:
    """Move `paths` into a new folder `<root>/previous-<n>` and return it."""
    numbers = [int(m[1]) for p in root.iterdir() if (m := _PREVIOUS.fullmatch(p.name))]
    previous = root / f"previous-{max(numbers, default=0) + 1}"
    previous.mkdir()
    for path in paths:
        path.rename(previous / path.name)
    fsync_path(previous)
    fsync_path(root)
    return previous


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        note_progress()
    finally:
        os.close(descriptor)


def _own_files(folder: Path) -> set[str]:
    """Return the manifest and the files it lists; empty if there is no valid manifest."""
    try:
        return {MANIFEST, *read_manifest(folder)["files"]}
    except StorageError:
        return set()


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _files(folder: Path) -> set[str]:
    return {
        str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir() or p.is_symlink()
    }


def _crc32(file: Path) -> int:
    value = 0
    with file.open("rb") as source:
        while chunk := source.read(1 << 22):
            value = zlib.crc32(chunk, value)
            note_progress()
    return value


def check_disk_space(out_dir: str | Path, num_bytes: int) -> None:
    """Raise ModelError if `out_dir` is not writable or its disk has less than `num_bytes` free."""
    folder = Path(out_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ModelError(f"output folder {str(out_dir)!r}: {str(folder)!r} is not writable")
    total, _, free = shutil.disk_usage(folder)
    if total == 0:
        raise ModelError(
            f"output folder {str(out_dir)!r}: the file system of {str(folder)!r} stores no files; "
            "choose another folder"
        )
    if free < num_bytes:
        raise ModelError(
            f"output folder {str(out_dir)!r} has {_readable(free)} free, needs "
            f"{_readable(num_bytes)}; free some space or choose another folder"
        )


def free_space(path: str | Path) -> str:
    """Return how much space is left for `path`, such as "1.5 GiB free"."""
    folder = Path(path).absolute()
    while True:
        try:
            return f"{_readable(shutil.disk_usage(folder).free)} free"
        except (FileNotFoundError, NotADirectoryError):  # not there yet, or removed just now
            folder = folder.parent


def _readable(num_bytes: int) -> str:
    """Format as in 1000 bytes, 12.3 MiB, 1.5 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


class Write:
    """A write that is under way; its thread observes its progress.

    Attributes:
        folder: the folder that is written.
        progressed: when it last made progress, of `time.monotonic`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.progressed = folder, time.monotonic()
        self._last: tuple[int, int] | None = None

    def observe(self) -> None:
        """Compare with the last observation. Waits where the disk does not answer."""
        now = _num_noted, _num_bytes(self.folder)
        if now != self._last:
            self._last, self.progressed = now, time.monotonic()


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Name what runs inside a write to `folder`, a file or folder that need not exist yet.

    Progress is that the bytes in `folder` change, or a call of `note_progress`.
    """
    write, ended = Write(folder), threading.Event()

    def observe() -> None:
        write.observe()
        while not ended.wait(_POLL_S):
            write.observe()

    _active.append(write)
    threading.Thread(target=observe, name="write-progress", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
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


def total_memory() -> float:
    """Return the bytes of memory of this machine or its control group (container)."""
    import psutil

    total = float(psutil.virtual_memory().total)
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no control group, or "max": without a limit
            total = min(total, float((Path("/sys/fs/cgroup") / limit).read_text()))
    return total


@contextmanager
def memory_limit(extra_bytes: int) -> Iterator[None]:
    """Limit the address space of this process to `extra_bytes` more than it has.

    Allocating more is a MemoryError. No effect where there is no /proc (no Linux).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    try:
        with suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limits.append(pages * resource.getpagesize() + extra_bytes)
            resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
