"""Tokenised datasets in files, written once per machine and shared by its ranks; their batches.

An entry is a file, `<HYBRIDENGINE_CACHE>/data/<key>` (by default under ~/.cache/hybridengine). The
key is a hash of all that the content depends on: data files, tokenizer, template, settings, and the
code of this package. The first process writes it; the others wait at a file lock. Records are
msgpack with a checksum each: a damaged entry is noticed, and none runs code.

`PromptLoader` iterates over a dataset in a seeded order that resumes exactly.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import importlib.metadata
import os
import random
import shutil
import struct
import sys
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Generic, TypeVar, overload
from uuid import UUID

import msgspec
from msgspec.msgpack import Ext

from hybridengine.run.config.common import DatasetConfig
from hybridengine.run.errors import DataError, OutputError
from hybridengine.run.storage import atomic_file
from hybridengine.train.data.chats import ChatTemplate
from hybridengine.train.data.files import data_files
from hybridengine.train.data.template import SpecialTokens

T = TypeVar("T")

_PLACE = struct.Struct("<QII")  # offset, size and checksum of a record
_FOOTER = struct.Struct("<QQQI")  # end of the records, number of samples, of dropped ones, checksum
MAX_UNUSED_S = 30 * 24 * 3600.0  # after which an entry is removed
_TUPLE = 0
_MICROSECOND = datetime.timedelta(microseconds=1)
# Values of parquet and JSON that msgpack lacks: type, to text, from text, by their code.
_TYPES: dict[int, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    1: (int, str, int),  # of more than 64 bits
    2: (Decimal, str, Decimal),
    # before date, its superclass
    3: (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    4: (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    5: (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    6: (
        datetime.timedelta,
        lambda t: str(t // _MICROSECOND),
        lambda text: int(text) * _MICROSECOND,
    ),
    7: (UUID, str, UUID),
}


def identify(
    files: str | Sequence[str],
    tokenizer: Any,
    template: ChatTemplate,
    data: DatasetConfig,
    *settings: Any,
) -> tuple[str, str]:
    """Return the hash of the data files' contents, and the key of their tokenised samples.

    settings: what samples depend on besides files, tokenizer, template and images.
    """
    paths = data_files(files)
    folders = [str(f.parent.resolve()) for f in paths] if template.preparer else []  # of images
    content = _content_hash(paths)
    own = (template.inputs, data.image_key, folders)
    return content, fingerprint(tokenizer, content, *settings, *own)


def fingerprint(tokenizer: Any, content: str, *settings: Any) -> str:
    """Return a hash of tokenizer, content hash of the files, settings and this package's code."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = (
        importlib.metadata.version("transformers"),
        sys.byteorder,
        type(tokenizer).__name__,
        backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        sorted(SpecialTokens(tokenizer, "text").ids),
        tokenizer.eos_token_id,
        content,
        _content_hash(sorted(Path(__file__).parent.glob("*.py"))),
        *settings,
    )
    text = "".join(f"{part!r}\0" for part in parts)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def _content_hash(files: Iterable[Path]) -> str:
    """Return a hash of the files' contents, in order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


class CachedDataset(Sequence[T], Generic[T]):
    """The samples that `make` yields, read from the cache entry `key` where it exists.

    sample_type: of the samples, a dataclass, or Any for plain values. Fields are numbers, text,
      bytes, lists, arrays of int32, dataclasses, and values as they are in data files.

    Attributes:
        dropped: the number of None that `make` yielded, which are left out.

    Without a writable cache the samples are held in memory.
    """

    def __init__(self, key: str, make: Callable[[], Iterable[T | None]], sample_type: Any) -> None:
        self._samples: Sequence[T]
        try:
            self._samples = entry = _read_or_write(_cache_folder() / key, make, sample_type)
            self.dropped = entry.dropped
        except (OSError, OutputError) as error:
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
        self._file = path.open("rb")
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            sample_type, dec_hook=lambda _, value: array("i", value), ext_hook=_from_extension
        )
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
        return self._decoder.decode(record)


def _read_or_write(
    file: Path, make: Callable[[], Iterable[T | None]], sample_type: Any
) -> _StoredSamples[T]:
    """Return the entry; write it first where it is missing or damaged."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(OSError, ValueError):
            return _StoredSamples(file, sample_type)
        with atomic_file(file) as partial:
            _write(partial, make())
        _remove_unused(file.parent)
        return _StoredSamples(file, sample_type)


def _write(path: Path, samples: Iterable[T | None]) -> None:
    places, dropped, end = list[bytes](), 0, 0
    with path.open("wb") as file:
        for sample in samples:
            if sample is None:
                dropped += 1
            else:
                record = msgspec.msgpack.encode(_storable(sample), enc_hook=array.tobytes)
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
            if time.time() - entry.stat().st_mtime > MAX_UNUSED_S:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _storable(value: Any) -> Any:
    if value is None or isinstance(value, str | bytes | float | bool | array):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return value
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {name: _storable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_storable(item) for item in value]
    if isinstance(value, tuple):
        return Ext(_TUPLE, msgspec.msgpack.encode([_storable(item) for item in value]))
    for code, (known, to_text, _) in _TYPES.items():
        if isinstance(value, known):
            return Ext(code, to_text(value).encode())
    raise TypeError(f"a sample cannot contain {value!r}, of type {type(value).__name__}")


def _from_extension(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(msgspec.msgpack.decode(data, ext_hook=_from_extension))
    return _TYPES[code][2](str(data, "utf-8"))


class Subset(Sequence[T], Generic[T]):
    """Some samples of a dataset, read from it at every access: no sample is kept in memory."""

    def __init__(self, dataset: Sequence[T], indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Subset[T]: ...
    def __getitem__(self, index: int | slice) -> T | Subset[T]:
        if isinstance(index, slice):
            return Subset(self.dataset, self.indices[index])
        return self.dataset[self.indices[index]]

    def take(self, positions: Sequence[int]) -> Subset[T]:
        """Select samples by their positions in this subset."""
        return Subset(self.dataset, [self.indices[i] for i in positions])

    def __add__(self, other: Subset[T]) -> Subset[T]:
        """Append another subset of the same dataset."""
        if other.dataset is not self.dataset:
            raise ValueError("subsets of two datasets cannot be joined; expected one dataset")
        return Subset(self.dataset, self.indices + other.indices)


class PromptLoader:
    """Yields endless batches of `batch_size` samples; every epoch has its own permutation.

    The order is a function of (seed, epoch) alone, so every rank sees the same batches and a resume
    needs only the number of batches. Each epoch drops the last `len(dataset) % batch_size` samples
    of its permutation.

    Attributes:
        num_batches: batches returned so far, over all epochs.
        in_flight: batches that were returned and not trained on; a resume returns them again.
    """

    def __init__(
        self, dataset: Sequence[Any], batch_size: int, *, seed: int, shuffle: bool = True
    ) -> None:
        if len(dataset) < batch_size:
            raise DataError(
                f"data.train_batch_size is {batch_size} but there are only {len(dataset)} training "
                "prompts; lower it or give more data"
            )
        self._dataset, self._batch_size = dataset, batch_size
        self._seed, self._shuffle = seed, shuffle
        self.num_batches = 0
        self.in_flight = 0

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self._dataset) // self._batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the next batch to train on, from 0."""
        return (self.num_batches - self.in_flight) // len(self)

    def next_batch(self) -> Subset[Any]:
        """Return the next `batch_size` samples, not yet read."""
        start = self.num_batches % len(self) * self._batch_size
        order = list(range(len(self._dataset)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self.num_batches // len(self)}").shuffle(order)
        self.num_batches += 1
        return Subset(self._dataset, order[start : start + self._batch_size])

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.num_batches - self.in_flight, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state`; DataError if the data or the seed have changed since.

        The state of an older version has no hash of the files' contents, which is not compared.
        """
        for key, now in self._identity().items():
            if (was := state.get(key, now)) == now:
                continue
            change = f"{key} was {was} and is {now}"
            if key == "content":
                change = "the rows of data.train_files have changed; restore the files"
            raise DataError(
                f"cannot resume the data order: {change}, or start anew with "
                "trainer.resume_mode=disable"
            )
        self.num_batches = state["batch"]

    def _identity(self) -> dict[str, Any]:
        return {
            "prompts": len(self._dataset),
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "content": getattr(self._dataset, "content", None),
        }
