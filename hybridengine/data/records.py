"""Tokenised data sets in memory-mapped files: made once per machine, shared by its ranks.

An entry is a folder, `<HYBRIDENGINE_CACHE>/data/<key>` (by default under ~/.cache/hybridengine),
whose key is a hash of all that its content depends on: data files, tokenizer, template, settings,
and the code here. Whoever comes first makes it, the others wait at a lock for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import mmap
import os
import pickle
import shutil
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

__all__ = ["Records", "fingerprint"]

T = TypeVar("T")

_KEPT_S = 30 * 24 * 3600.0  # entries that have not been used for so long are removed


def fingerprint(tokenizer: Any, files: Iterable[Path], *settings: Any) -> str:
    """Return a hash of the tokenizer, the content of `files` in order, `settings` and this code."""
    seen = hashlib.sha256()
    version = importlib.metadata.version("transformers")
    for part in (version, sys.byteorder, *_identity(tokenizer), *settings):
        seen.update(f"{part!r}\0".encode(errors="surrogatepass"))
    for file in [*sorted(Path(__file__).parent.glob("*.py")), *files]:
        with file.open("rb") as content:
            seen.update(hashlib.file_digest(content, "sha256").digest())
    return seen.hexdigest()[:32]


def _identity(tokenizer: Any) -> tuple[Any, ...]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return type(tokenizer).__name__, words, tokenizer.all_special_ids, tokenizer.eos_token_id


class Records(Sequence[T], Generic[T]):
    """The records that `make` yields, from the cache where an entry `key` is there.

    Attributes:
        dropped: how many None were among them, which are left out.

    A cache that cannot be written is no fault: the records are then held in memory.
    """

    def __init__(self, key: str, make: Callable[[], Iterable[T | None]]) -> None:
        self._records: Sequence[T]
        try:
            entry = _entry(_folder() / key, make)
        except _Unwritable as error:
            print(f"tokenised data is not cached: {error}", file=sys.stderr)
            made = list(make())
            self._records = [record for record in made if record is not None]
            self.dropped = len(made) - len(self._records)
        else:
            self._records, self.dropped = entry, entry.dropped

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._records[i] for i in range(*index.indices(len(self)))]
        return self._records[index]


class _Unwritable(Exception):
    """The cache cannot be written."""


def _folder() -> Path:
    try:
        cache = Path(os.environ.get("HYBRIDENGINE_CACHE", "~/.cache/hybridengine")).expanduser()
    except RuntimeError as error:  # a user without a home
        raise _Unwritable(error) from None
    return cache / "data"


class _Mapped(Sequence[Any]):
    """Pickled records in one file, and where each begins; raises OSError where a file is cut."""

    def __init__(self, folder: Path) -> None:
        about = json.loads((folder / "about.json").read_text())
        self.dropped: int = about["dropped"]
        self._starts = _map(folder / "starts", about["starts"]).cast("q")
        self._data = _map(folder / "records", self._starts[-1])
        os.utime(folder)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        at = range(len(self))[index]  # from the end where negative
        return pickle.loads(self._data[self._starts[at] : self._starts[at + 1]])


def _map(file: Path, size: int) -> memoryview:
    with file.open("rb") as content:
        if os.fstat(content.fileno()).st_size != size:
            raise OSError(f"{file} has not the {size} bytes it was written with")
        return (
            memoryview(mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ))
            if size
            else (memoryview(b""))
        )


def _entry(folder: Path, make: Callable[[], Iterable[Any]]) -> _Mapped:
    """The entry, made if it is not there or damaged."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f"{folder.name}.lock").open("w")
    except OSError as error:
        raise _Unwritable(error) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            return _Mapped(folder)
        temporary = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
        try:
            _write(temporary, make())
            with _unwritable():
                shutil.rmtree(folder, ignore_errors=True)
                temporary.rename(folder)
                _remove_unused(folder.parent)
                return _Mapped(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _unwritable() -> Any:
    try:
        yield
    except OSError as error:
        raise _Unwritable(error) from None


def _write(folder: Path, records: Iterable[Any]) -> None:
    starts, dropped = array("q", [0]), 0
    with (folder / "records").open("wb") as file:
        for record in records:
            if record is None:
                dropped += 1
                continue
            data = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
            with _unwritable():
                file.write(data)
            starts.append(starts[-1] + len(data))
        with _unwritable():
            file.flush()
            os.fsync(file.fileno())
    about = {"dropped": dropped, "starts": len(starts) * starts.itemsize}
    with _unwritable():
        (folder / "starts").write_bytes(starts.tobytes())
        (folder / "about.json").write_text(json.dumps(about))


def _remove_unused(folder: Path) -> None:
    """Remove what no run has used for a month; a run that has one mapped keeps its pages."""
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - entry.stat().st_mtime > _KEPT_S:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
