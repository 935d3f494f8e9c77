"""Read rows of parquet, Arrow and JSON files as plain dicts; JSON text is parsed strictly."""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hybridengine.run.errors import DataError, located
from hybridengine.train.data.json_text import parse_json

_ARROW_ENDINGS = (".parquet", ".arrow")
_ENDINGS = (*_ARROW_ENDINGS, ".jsonl", ".json", ".jsonl.gz", ".json.gz")
_EXPECTED = f"{', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}"
_CHUNK_ROWS = 256


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

    The files of a folder or glob are sorted by name; those of a folder that `datasets.save_to_disk`
    wrote are in their order.

    Raises DataError for a name without a file, and for an unknown ending.
    """
    paths: list[Path] = []
    for name in [names] if isinstance(names, str) else names:
        path = Path(name).expanduser()
        if path.is_dir():
            files = _saved_dataset(path) or [
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
    if file.suffix in _ARROW_ENDINGS:
        from hybridengine.train.data.arrow import arrow_rows

        rows = enumerate(arrow_rows(file))
        return ((RowLocation(file, f"row {number}"), row) for number, row in rows)
    if file.name.removesuffix(".gz").endswith(".json") and _is_array(file):
        return _array_items(file)
    return _line_items(file)


def _saved_dataset(folder: Path) -> list[Path] | None:
    """Return the files of a dataset that `datasets.save_to_disk` wrote; None for other folders."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in folder.glob("*/state.json"))
        raise DataError(
            f"data folder {folder} has several splits of a saved dataset; name one of them: "
            f"{', '.join(str(folder / split) for split in splits)}"
        )
    state = folder / "state.json"
    if not (state.is_file() and (folder / "dataset_info.json").is_file()):
        return None
    content = _parse(str(state), state.read_bytes())
    files = content.get("_data_files") if isinstance(content, dict) else None
    names = [file.get("filename") for file in files or () if isinstance(file, dict)]
    paths = [folder / Path(str(name)).name for name in names]
    if not paths or not all(path.is_file() for path in paths):
        raise DataError(
            f"data folder {folder} is no complete saved dataset: its state.json names the files "
            f"{names}; save it again by datasets.save_to_disk"
        )
    return paths


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
    return parse_json(where, text)
