"""Folders that are complete or absent, and whose removal deletes nothing of a user's own.

`seal` writes `complete.json`, which lists every file of a folder with its size and checksum, after
all of them are on the disk. What replaces or removes such a folder deletes only the files listed
there; anything else is moved to `previous-<n>/` beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "MANIFEST",
    "StorageError",
    "atomic_file",
    "damage",
    "file_records",
    "foreign_file",
    "fsync_path",
    "new_folder",
    "read_manifest",
    "remove_folder",
    "replace_folder",
    "seal",
    "set_aside",
]

MANIFEST = "complete.json"

Record = list[int]  # [bytes, CRC-32]

_READ_BYTES = 1 << 22
_PREVIOUS = re.compile(r"previous-(\d+)")


class StorageError(ValueError):
    """A folder that is incomplete or damaged; the message says what is wrong with which file."""


def file_records(folder: Path, names: Iterable[str] | None = None) -> dict[str, Record]:
    """Size and CRC-32 of files in `folder`, which are flushed to the disk first.

    names: relative to `folder`; None: every file there but the manifest.
    """
    wanted = _files(folder) - {MANIFEST} if names is None else set(names)
    for name in wanted:
        fsync_path(folder / name)
    paths = {name: folder / name for name in sorted(wanted)}
    return {name: [path.stat().st_size, _crc32(path)] for name, path in paths.items()}


def seal(folder: Path, records: Mapping[str, Record] | None = None, **extra: Any) -> None:
    """Make `folder` complete: all of it on the disk, readable as the umask says, and listed.

    records: of all files, as `file_records` gives them; None: they are computed here.
    extra: more to keep in the manifest.
    """
    records = file_records(folder) if records is None else records
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({**extra, "files": dict(records)}, indent=1))
    mode = manifest.stat().st_mode & 0o666  # of a plain new file; writers' temporary ones have 0600
    for name in records:
        (folder / name).chmod(mode)
    fsync_path(manifest)
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        fsync_path(path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `seal` wrote; StorageError if there is none, or it was cut."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
        for name, record in found["files"].items():
            if isinstance(record, int):
                raise StorageError("was written by an older version, without checksums")
            if len(record) != 2 or Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"malformed entry {name!r}")
    except FileNotFoundError:
        what = f"has no {MANIFEST}: it was never completed" if folder.is_dir() else "is no folder"
        raise StorageError(what) from None
    except StorageError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StorageError(f"has a damaged {MANIFEST} ({error}); copy it again") from None
    return found


def damage(folder: Path, records: Mapping[str, Record], checksums: bool) -> str | None:
    """The first difference between `records` and the files of `folder`; None if there is none.

    checksums: read every byte, not only the sizes.
    """
    for name, (size, crc32) in records.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or cut, expected {size} bytes; copy it again"
        if checksums and _crc32(file) != crc32:
            return f"{name} is damaged: its checksum is not the one it was written with"
    return None


def foreign_file(folder: Path) -> str | None:
    """A file in `folder` that its manifest does not list; None if nothing there is a user's own."""
    try:
        own = {MANIFEST, *read_manifest(folder)["files"]}
    except StorageError:
        own = set()
    return min(_files(folder) - own, default=None)


@contextmanager
def new_folder(name: Path, **extra: Any) -> Iterator[Path]:
    """Yield a hidden neighbour of `name` to write files into; if the block succeeds, it is sealed
    (with `extra`) and takes the name (`replace_folder`), else it is removed."""
    partial = name.with_name(f".{name.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        seal(partial, **extra)
        replace_folder(partial, name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_folder(written: Path, name: Path) -> None:
    """Give a complete folder its name; what had the name is removed, or moved to `previous-<n>`
    if it holds anything that was not written by this package."""
    if name.is_dir() and foreign_file(name) is None:
        outgoing = name.with_name(f".{name.name}.replaced")
        if outgoing.exists():
            remove_folder(outgoing)
        name.rename(outgoing)
        written.rename(name)
        remove_folder(outgoing)
    else:
        if os.path.lexists(name):
            set_aside([name], name.parent)
        written.rename(name)
    fsync_path(name.parent)


def remove_folder(folder: Path) -> None:
    """Delete what the manifest of `folder` lists, and `folder` itself if nothing else is there."""
    try:
        own = list(read_manifest(folder)["files"])
    except StorageError:
        own = []
    (folder / MANIFEST).unlink(missing_ok=True)  # first: half a folder must not pass for complete
    for name in own:
        (folder / name).unlink(missing_ok=True)
    inner = sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True)
    for path in [*inner, folder]:
        if not any(path.iterdir()):
            path.rmdir()


def set_aside(paths: Iterable[Path], root: Path) -> Path:
    """Move `paths` into a new folder `<root>/previous-<n>`, which is returned."""
    numbers = [int(m[1]) for p in root.iterdir() if (m := _PREVIOUS.fullmatch(p.name))]
    previous = root / f"previous-{max(numbers, default=0) + 1}"
    previous.mkdir()
    for path in paths:
        path.rename(previous / path.name)
    fsync_path(previous)
    fsync_path(root)
    return previous


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> set[str]:
    return {
        str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir() or p.is_symlink()
    }


def _crc32(file: Path) -> int:
    value = 0
    with file.open("rb") as source:
        while chunk := source.read(_READ_BYTES):
            value = zlib.crc32(chunk, value)
    return value


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
