"""Rows of parquet and JSON files, as plain dicts."""

from __future__ import annotations

import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridengine.errors import UserError

__all__ = ["DataError", "data_files", "read_rows"]

_ENDINGS = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz")
_MAX_DEPTH = 100  # of lists and objects in each other
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class DataError(UserError):
    """A data file or row that cannot be used; the message says which, and what was expected."""


def data_files(names: str | Sequence[str]) -> list[Path]:
    """Return the files that `names` stand for: files, folders (all data files below), globs.

    The files of a folder or glob are in the order of their names.

    Raises DataError for a name that stands for no file, and for an unknown ending.
    """
    found: list[Path] = []
    for name in [names] if isinstance(names, str) else names:
        path = Path(name).expanduser()
        if path.is_dir():
            files = [f for f in sorted(path.rglob("*")) if f.is_file() and _has_ending(f)]
            if not files:
                raise DataError(f"data folder {path} holds no {_endings()} file")
        elif path.is_file():
            files = [path]
        else:
            files = [Path(f) for f in sorted(glob.glob(str(path), recursive=True))]
            files = [f for f in files if f.is_file()]
            if not files:
                verb = "matches no file" if glob.has_magic(name) else "does not exist"
                raise DataError(f"data file {path} {verb}; check data.train_files / data.val_files")
        found += files
    for file in found:
        if not _has_ending(file):
            raise DataError(f"data file {file} ends in {file.suffix!r}, expected {_endings()}")
    return found


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) for every row, `where` naming the file and the line or row number.

    A .json file is an array of rows, or has one row per line as .jsonl.

    Raises DataError for content that cannot be parsed.
    """
    if file.suffix == ".parquet":
        return _parquet_rows(file)
    if file.name.removesuffix(".gz").endswith(".json") and _is_array(file):
        return _array_rows(file)
    return _line_rows(file)


def _has_ending(file: Path) -> bool:
    return file.name.endswith(_ENDINGS)


def _endings() -> str:
    return f"{', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}"


def _parquet_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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
                    yield f"{file}, row {number}", row
                    number += 1
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}, row {number} or later has text that is not UTF-8: {error}"
        ) from None
    except (ArrowException, OSError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"data file {file} is not a readable parquet file: {reason}") from None


def _open(file: Path) -> Any:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")


def _lines(file: Path) -> Iterator[bytes]:
    """The lines of the file, which may be compressed, without a byte order mark."""
    try:
        with _open(file) as lines:
            for number, line in enumerate(lines):
                yield line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {file} cannot be read: {error}") from None


def _is_array(file: Path) -> bool:
    first = next((line for line in _lines(file) if line.strip()), b"")
    return first.lstrip().startswith(b"[")


def _array_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = _parse(str(file), b"".join(_lines(file)))
    if not isinstance(rows, list):
        raise DataError(f"{file} is a JSON {type(rows).__name__}, expected a list")
    for number, row in enumerate(rows):
        yield _object(f"{file}, item {number}", row)


def _line_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_lines(file), start=1):
        where = f"{file}, line {number}"
        if line.strip():
            yield _object(where, _parse(where, line))


def _object(where: str, row: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict):
        raise DataError(f"{where} is a JSON {type(row).__name__}, expected an object")
    return where, row


def _parse(where: str, data: bytes) -> Any:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error}") from None
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates)
        if text.count("[") + text.count("{") > _MAX_DEPTH and _depth(value) > _MAX_DEPTH:
            raise RecursionError
    except RecursionError:
        raise DataError(
            f"{where} has more than {_MAX_DEPTH} lists and objects in each other"
        ) from None
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(
                f"{where} has {half!a}, half of a surrogate pair, which is no character; "
                "remove it or write the pair"
            ) from None
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [x for v in level for x in (v.values() if isinstance(v, dict) else v)]
    return depth
