"""Rows of parquet and jsonl files, as plain dicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridengine.errors import UserError

__all__ = ["DataError", "read_rows"]


class DataError(UserError):
    """A data file or row that cannot be used; the message says which, and what was expected."""


def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) for every row, `where` naming the file and the line or row number.

    Raises DataError for a missing file, an unknown ending, and content that cannot be parsed.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"data file {file} does not exist; check data.train_files / data.val_files")
    if file.suffix == ".parquet":
        return _parquet_rows(file)
    if file.suffix in (".jsonl", ".json"):
        return _jsonl_rows(file)
    raise DataError(f"data file {file} ends in {file.suffix!r}, expected .parquet or .jsonl")


def _parquet_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow.parquet as pq
    from pyarrow.lib import ArrowException

    try:
        rows = pq.read_table(file).to_pylist()
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"data file {file} is not a readable parquet file: {reason}") from None
    for number, row in enumerate(rows):
        yield f"{file}, row {number}", row


def _jsonl_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{where} is a JSON {type(row).__name__}, expected an object")
            yield where, row
