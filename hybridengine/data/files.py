"""Read rows of parquet and JSON files as plain dicts."""

from __future__ import annotations

import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hybridengine.errors import DataError, located

_ENDINGS = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz")
_EXPECTED = f"{', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}"
_CHUNK_ROWS = 256
_MAX_DEPTH = 100  # of nested lists and objects
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class RowLocation(str):
    """A data file and the number of a row or line in it, for messages.

    folder: that of the file.
    """

    folder: Path

    def __new__(cls, file: Path, row: str) -> RowLocation:
        location = super().__new__(cls, f"{file}, {row}")
        location.folder = file.parent
        return location


def data_files(names: str | Sequence[str]) -> list[Path]:
    """Return the data files of `names`: files, folders (all data files below them) and globs.

    The files of a folder or glob are sorted by name.

    Raises DataError for a name without a file, and for an unknown ending.
    """
    paths: list[Path] = []
    for name in [names] if isinstance(names, str) else names:
        path = Path(name).expanduser()
        if path.is_dir():
            files = [
                f for f in sorted(path.rglob("*")) if f.is_file() and f.name.endswith(_ENDINGS)
            ]
            if not files:
                raise DataError(f"data folder {path} holds no {_EXPECTED} file")
        elif path.is_file():
            files = [path]
        else:
            files = [Path(f) for f in sorted(glob.glob(str(path), recursive=True))]
            files = [f for f in files if f.is_file()]
            if not files:
                verb = "matches no file" if glob.has_magic(name) else "does not exist"
                raise DataError(f"data file {located(path)} {verb}; check the path")
        paths += files
    for file in paths:
        if not file.name.endswith(_ENDINGS):
            raise DataError(f"data file {file} ends in {file.suffix!r}, expected {_EXPECTED}")
    return paths


def read_files(names: str | Sequence[str]) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    """Yield (where, row) for every row of `data_files(names)`. A .json file is an array of
    rows, or has one row per line like .jsonl.

    Raises DataError for content that cannot be parsed, and where there is no row at all.
    """
    files, empty = data_files(names), True
    for where, row in chain.from_iterable(map(_read, files)):
        if not isinstance(row, dict):
            raise DataError(f"{where} is a JSON {type(row).__name__}, expected an object")
        empty = False
        yield where, row
    if empty:
        raise DataError(f"no rows in {', '.join(map(str, files))}; the data file is empty")


def read_chunks(names: str | Sequence[str]) -> Iterator[list[tuple[RowLocation, dict[str, Any]]]]:
    """As `read_files`, in lists of rows to tokenise at once."""
    rows = read_files(names)
    while chunk := list(islice(rows, _CHUNK_ROWS)):
        yield chunk


def require_columns(where: str, row: Mapping[str, Any], *columns: str) -> None:
    """Raise DataError where `row` lacks one of `columns`."""
    for column in columns:
        if column not in row:
            columns_there = ", ".join(row) or "none"
            raise DataError(f"{where} has no column {column!r}; columns there: {columns_there}")


def _read(file: Path) -> Iterator[tuple[RowLocation, Any]]:
    if file.suffix == ".parquet":
        return _parquet_rows(file)
    if file.name.removesuffix(".gz").endswith(".json") and _is_array(file):
        return _array_items(file)
    return _line_items(file)


def _parquet_rows(file: Path) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    import pyarrow.parquet as pq
    from pyarrow.lib import ArrowException

    number = 0
    try:
        with pq.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"data file {file} has the column {twice[0]!r} twice")
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield RowLocation(file, f"row {number}"), row
                    number += 1
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}, row {number} or later has text that is not UTF-8: {error}"
        ) from None
    except (ArrowException, OSError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"data file {file} is not a readable parquet file: {reason}") from None


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a plain or gzip file, without a byte order mark."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines):
                yield line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {file} cannot be read: {error}") from None


def _is_array(file: Path) -> bool:
    first = next((line for line in _lines(file) if line.strip()), b"")
    return first.lstrip().startswith(b"[")


def _array_items(file: Path) -> Iterator[tuple[RowLocation, Any]]:
    for number, item in enumerate(_parse(str(file), b"".join(_lines(file)))):
        yield RowLocation(file, f"item {number}"), item


def _line_items(file: Path) -> Iterator[tuple[RowLocation, Any]]:
    for number, line in enumerate(_lines(file), start=1):
        if line.strip():
            yield (where := RowLocation(file, f"line {number}")), _parse(where, line)


def _parse(where: str, data: bytes) -> Any:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error}") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
        if text.count("[") + text.count("{") > _MAX_DEPTH and _depth(value) > _MAX_DEPTH:
            raise RecursionError
    except RecursionError:
        raise DataError(f"{where} has more than {_MAX_DEPTH} nested lists and objects") from None
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            surrogate = error.object[error.start]
            raise DataError(
                f"{where} has {surrogate!a}, half of a surrogate pair, which is no character; "
                "remove it or write the pair"
            ) from None
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [x for v in level for x in (v.values() if isinstance(v, dict) else v)]
    return depth
