"""Cache tokenised datasets in files: written once per machine, shared by its ranks.

An entry is a file, `<HYBRIDENGINE_CACHE>/data/<key>` (by default under ~/.cache/hybridengine). The
key is a hash of all that the content depends on: data files, tokenizer, template, settings, and the
code of this package. The first process writes it; the others wait at a file lock. Records are
msgpack with a checksum each: a damaged entry is noticed, and none runs code.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from hybridengine.run.errors import DataError
from hybridengine.train.data.files import data_files
from hybridengine.train.data.records import Records
from hybridengine.train.data.special_tokens import SpecialTokens

T = TypeVar("T")

_PLACE = struct.Struct("<QII")  # offset, size and checksum of a record
_FOOTER = struct.Struct("<QQQI")  # end of the records, number of samples, of dropped ones, checksum
_MAX_UNUSED_S = 30 * 24 * 3600.0  # after which an entry is removed


def content_hash(files: Iterable[Path]) -> str:
    """Return a hash of the files' contents, in order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def identify(files: str | Sequence[str], tokenizer: Any, *settings: Any) -> tuple[str, str]:
    """Return the hash of the data files' contents, and the key of their tokenised samples."""
    content = content_hash(data_files(files))
    return content, fingerprint(tokenizer, content, *settings)


def fingerprint(tokenizer: Any, content: str, *settings: Any) -> str:
    """Return a hash of tokenizer, content hash of the files, settings and this package's code."""
    digest = hashlib.sha256()
    version = importlib.metadata.version("transformers")
    package = Path(__file__).parent.parent
    files = [file for name in ("data", "vision") for file in package.glob(f"{name}/*.py")]
    code = content_hash(sorted(files))
    for part in (version, sys.byteorder, *_tokenizer_state(tokenizer), content, code, *settings):
        digest.update(f"{part!r}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()[:32]


def _tokenizer_state(tokenizer: Any) -> tuple[Any, ...]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    special = sorted(SpecialTokens(tokenizer, "text").ids)
    return type(tokenizer).__name__, words, special, tokenizer.eos_token_id


class CachedDataset(Sequence[T], Generic[T]):
    """The samples that `make` yields, read from the cache entry `key` where it exists.

    sample_type: of the samples, see `Records`.

    Attributes:
        dropped: the number of None that `make` yielded, which are left out.

    Without a writable cache the samples are held in memory.
    """

    def __init__(self, key: str, make: Callable[[], Iterable[T | None]], sample_type: Any) -> None:
        self._samples: Sequence[T]
        try:
            self._samples = entry = _read_or_write(_cache_folder() / key, make, sample_type)
            self.dropped = entry.dropped
        except OSError as error:
            print(f"tokenised data is not cached: {error}", file=sys.stderr)
            made = list(make())
            self._samples = [sample for sample in made if sample is not None]
            self.dropped = len(made) - len(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._samples[i] for i in range(*index.indices(len(self)))]
        return self._samples[index]


def _cache_folder() -> Path:
    try:
        cache = Path(os.environ.get("HYBRIDENGINE_CACHE", "~/.cache/hybridengine")).expanduser()
    except RuntimeError as error:  # a user without a home
        raise OSError(error) from None
    return cache / "data"


class _StoredSamples(Sequence[T]):
    """A file of records, then offset, size and CRC-32 of each (`_PLACE`), then the footer.

    Every record is read when it is asked for and compared with its checksum. Raises OSError where
    there is no such file, and ValueError where it is none or is truncated.
    """

    def __init__(self, path: Path, sample_type: Any) -> None:
        self._file, self._records = path.open("rb"), Records[T](sample_type)
        size = os.fstat(self._file.fileno()).st_size
        footer = os.pread(self._file.fileno(), _FOOTER.size, max(0, size - _FOOTER.size))
        if len(footer) < _FOOTER.size or zlib.crc32(footer[:-4]) != _FOOTER.unpack(footer)[-1]:
            raise ValueError(f"{path} is damaged")
        self._end, self._len, self.dropped, _ = _FOOTER.unpack(footer)
        if self._end + _PLACE.size * self._len + _FOOTER.size != size:
            raise ValueError(f"{path} is damaged")
        os.utime(path)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: Any) -> Any:
        i = range(len(self))[index]  # negative: from the end
        with suppress(OSError, ValueError, struct.error):
            return self._read(i)
        path = Path(self._file.name)
        with suppress(OSError):
            path.unlink()
        raise DataError(
            f"the cache of tokenised data {path} is damaged at sample {i} and has been removed; "
            "start the run again, which makes it anew"
        )

    def _read(self, i: int) -> T:
        place = os.pread(self._file.fileno(), _PLACE.size, self._end + _PLACE.size * i)
        offset, size, checksum = _PLACE.unpack(place)
        if offset + size > self._end:
            raise ValueError
        record = os.pread(self._file.fileno(), size, offset)
        if len(record) != size or zlib.crc32(record) != checksum:
            raise ValueError
        return self._records.decode(record)


def _read_or_write(
    file: Path, make: Callable[[], Iterable[T | None]], sample_type: Any
) -> _StoredSamples[T]:
    """Return the entry; write it first where it is missing or damaged."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(OSError, ValueError):
            return _StoredSamples(file, sample_type)
        partial = file.with_suffix(".partial")
        try:
            _write(partial, make(), Records(sample_type))
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        _remove_unused(file.parent)
        return _StoredSamples(file, sample_type)


def _write(path: Path, samples: Iterable[T | None], records: Records[T]) -> None:
    places, dropped, end = list[bytes](), 0, 0
    with path.open("wb") as file:
        for sample in samples:
            if sample is None:
                dropped += 1
            else:
                record = records.encode(sample)
                places.append(_PLACE.pack(end, len(record), zlib.crc32(record)))
                end += file.write(record)
        file.writelines(places)
        footer = _FOOTER.pack(end, len(places), dropped, 0)[:-4]
        file.write(footer + struct.pack("<I", zlib.crc32(footer)))
        file.flush()
        os.fsync(file.fileno())


def _remove_unused(folder: Path) -> None:
    """Remove entries that no run has used for 30 days; a run keeps the file it has open."""
    for entry in folder.iterdir():
        with suppress(OSError):
            if time.time() - entry.stat().st_mtime > _MAX_UNUSED_S:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
