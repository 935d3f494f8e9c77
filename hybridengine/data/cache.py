"""Cache tokenised datasets in memory-mapped files: written once per machine, shared by its ranks.

An entry is a file, `<HYBRIDENGINE_CACHE>/data/<key>` (by default under ~/.cache/hybridengine). The
key is a hash of all that the content depends on: data files, tokenizer, template, settings, and the
code of this package. The first process writes it; the others wait at a file lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import mmap
import os
import pickle
import shutil
import struct
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")

_FOOTER = struct.Struct("qq")  # number of samples, number of dropped ones
_MAX_UNUSED_S = 30 * 24 * 3600.0  # after which an entry is removed


def fingerprint(tokenizer: Any, files: Iterable[Path], *settings: Any) -> str:
    """Return a hash of tokenizer, files' content in order, settings and this package's code."""
    digest = hashlib.sha256()
    version = importlib.metadata.version("transformers")
    for part in (version, sys.byteorder, *_tokenizer_state(tokenizer), *settings):
        digest.update(f"{part!r}\0".encode(errors="surrogatepass"))
    for file in [*sorted(Path(__file__).parent.glob("*.py")), *files]:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:32]


def _tokenizer_state(tokenizer: Any) -> tuple[Any, ...]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return type(tokenizer).__name__, words, tokenizer.all_special_ids, tokenizer.eos_token_id


class CachedDataset(Sequence[T], Generic[T]):
    """The samples that `make` yields, read from the cache entry `key` where it exists.

    Attributes:
        dropped: the number of None that `make` yielded, which are left out.

    Without a writable cache the samples are held in memory.
    """

    def __init__(self, key: str, make: Callable[[], Iterable[T | None]]) -> None:
        self._samples: Sequence[T]
        try:
            self._samples = entry = _read_or_write(_cache_folder() / key, make)
            self.dropped = entry.dropped
        except OSError as error:
            print(f"tokenised data is not cached: {error}", file=sys.stderr)
            made = list(make())
            self._samples = [sample for sample in made if sample is not None]
            self.dropped = len(made) - len(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._samples[i] for i in range(*index.indices(len(self)))]
        return self._samples[index]


def _cache_folder() -> Path:
    try:
        cache = Path(os.environ.get("HYBRIDENGINE_CACHE", "~/.cache/hybridengine")).expanduser()
    except RuntimeError as error:  # a user without a home
        raise OSError(error) from None
    return cache / "data"


class _MappedSamples(Sequence[Any]):
    """A file of pickled samples, then the offset of each and of their end, then the footer.

    Raises OSError where there is no such file, and ValueError where its sizes do not agree.
    """

    def __init__(self, file: Path) -> None:
        with file.open("rb") as content:
            self._data = memoryview(mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ))
        begin = end = len(self._data) - _FOOTER.size
        if end >= 0:
            num_samples, self.dropped = _FOOTER.unpack(self._data[end:])
            begin -= 8 * (num_samples + 1)
        if not 0 <= begin < end:
            raise ValueError(f"{file} is truncated")
        self._offsets = self._data[begin:end].cast("q")
        if self._offsets[-1] != begin:
            raise ValueError(f"{file} is truncated")
        os.utime(file)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        i = range(len(self))[index]  # negative: from the end
        return pickle.loads(self._data[self._offsets[i] : self._offsets[i + 1]])


def _read_or_write(file: Path, make: Callable[[], Iterable[Any]]) -> _MappedSamples:
    """Return the entry; write it first where it is missing or damaged."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError, ValueError):
            return _MappedSamples(file)
        partial = file.with_suffix(".partial")
        try:
            _write(partial, make())
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        _remove_unused(file.parent)
        return _MappedSamples(file)


def _write(path: Path, samples: Iterable[Any]) -> None:
    offsets, dropped = array("q", [0]), 0
    with path.open("wb") as file:
        for sample in samples:
            if sample is None:
                dropped += 1
            else:
                file.write(pickle.dumps(sample, protocol=pickle.HIGHEST_PROTOCOL))
                offsets.append(file.tell())
        offsets.tofile(file)
        file.write(_FOOTER.pack(len(offsets) - 1, dropped))
        file.flush()
        os.fsync(file.fileno())


def _remove_unused(folder: Path) -> None:
    """Remove entries that no run has used for 30 days; a run keeps the pages it has mapped."""
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - entry.stat().st_mtime > _MAX_UNUSED_S:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
