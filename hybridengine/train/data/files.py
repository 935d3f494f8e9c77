"""Read rows of parquet, Arrow and JSON files as plain dicts.

JSON text is parsed strictly: no key twice, no deep nesting, no half of a surrogate pair. Columns of
parquet and Arrow files become

    numbers, text, bytes, booleans, decimals        int, float, str, bytes, bool, Decimal
    dates, times, timestamps, durations             those of `datetime`
    lists of any kind, structs, dictionaries        list, dict, the values themselves
    maps with text as keys                          dict
    arrow.json (`datasets.Json`, parquet's JSON)    the parsed value, as `datasets` gives it
    arrow.uuid, arrow.bool8, arrays of `datasets`   UUID, bool, nested lists

Anything else is refused, and so is a value that Python's type cannot hold, such as a timestamp with
nanoseconds. The error names the column.
"""

from __future__ import annotations

import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as is_type

from hybridengine.run.errors import DataError, located, reason_of

_ARROW_ENDINGS = (".parquet", ".arrow")
_ENDINGS = (*_ARROW_ENDINGS, ".jsonl", ".json", ".jsonl.gz", ".json.gz")
_EXPECTED = f"{', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}"
_CHUNK_ROWS = 256
_BATCH_ROWS = 1024  # of parquet
_JSON = "arrow.json"
_EXTENSIONS = (_JSON, "arrow.uuid", "arrow.bool8")
_ARRAYS = "datasets.features.features.Array"  # of datasets, 2D to 5D
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
    content = _decoded(str(state), state.read_bytes())
    files = content.get("_data_files") if isinstance(content, dict) else None
    names = [file.get("filename") for file in files or () if isinstance(file, dict)]
    paths = [folder / Path(str(name)).name for name in names]
    if not paths or not all(path.is_file() for path in paths):
        raise DataError(
            f"data folder {folder} is no complete saved dataset: its state.json names the files "
            f"{names}; save it again by datasets.save_to_disk"
        )
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
        for number, row in enumerate(_arrow_rows(file)):
            yield RowLocation(file, f"row {number}"), row
    elif file.name.removesuffix(".gz").endswith(".json") and _is_array(file):
        for number, item in enumerate(_decoded(str(file), b"".join(_lines(file)))):
            yield RowLocation(file, f"item {number}"), item
    else:
        for number, line in enumerate(_lines(file), start=1):
            if line.strip():
                yield (where := RowLocation(file, f"line {number}")), _decoded(where, line)


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


def _decoded(where: str, data: bytes) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error}") from None
    return parse_json(where, text)


class NotJsonError(DataError):
    """A text that is not JSON."""


class JsonObject(dict[str, Any]):
    """An object of JSON text: unlike those of a struct column, its nulls are its own."""


def parse_json(where: str, text: str) -> Any:
    """Return the value of a JSON text.

    Raises NotJsonError for text that is not JSON, and DataError for a key twice in one object, more
    than 100 nested lists and objects, and half of a surrogate pair.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
        if text.count("[") + text.count("{") > _MAX_DEPTH and _depth(value) > _MAX_DEPTH:
            raise RecursionError
    except RecursionError:
        raise DataError(f"{where} has more than {_MAX_DEPTH} nested lists and objects") from None
    except json.JSONDecodeError as error:
        raise NotJsonError(f"{where} is not JSON: {error}") from None
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


def _unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    value = JsonObject(pairs)
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


def _arrow_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file, an Arrow stream (`datasets`), or an Arrow file."""
    first = 0
    with _reader(file) as (schema, batches):
        if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
            raise DataError(f"data file {file} has the column {twice[0]!r} twice")
        types = [_plain_type(f"data file {file}, column {field.name!r}", field) for field in schema]
        for batch in batches:
            where = f"{file}, row {first} or later: column"
            columns = [
                _values(f"{where} {name!r}", column, plain)
                for name, column, plain in zip(schema.names, batch.columns, types, strict=True)
            ]
            first += batch.num_rows
            yield from (
                dict(zip(schema.names, row, strict=True)) for row in zip(*columns, strict=True)
            )


@contextmanager
def _reader(file: Path) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    is_parquet = file.suffix == ".parquet"
    try:
        if is_parquet:
            with pq.ParquetFile(file) as table:
                yield table.schema_arrow, table.iter_batches(batch_size=_BATCH_ROWS)
            return
        with pa.memory_map(str(file)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            yield reader.schema, map(_validated, batches)
    except (pa.ArrowException, OSError) as error:
        kind = "parquet" if is_parquet else "Arrow"
        raise DataError(
            f"data file {file} is not a readable {kind} file: {reason_of(error)}"
        ) from None


def _validated(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Check the offsets of a batch, which Arrow maps from the file as they are."""
    batch.validate(full=True)
    return batch


def _values(where: str, column: pa.Array, plain: pa.DataType) -> Sequence[Any]:
    try:
        own = column if column.type == plain else column.cast(plain)
        values = own.to_pylist(maps_as_pydicts="strict")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} has text that is not UTF-8: {error}") from None
    except (pa.ArrowException, ValueError, OverflowError, LookupError) as error:
        raise DataError(
            f"{where}, of type {column.type}, has a value that Python cannot hold: "
            f"{reason_of(error)}"
        ) from None
    return [_parsed(where, plain, value) for value in values] if _JSON in str(plain) else values


def _parsed(where: str, kind: pa.DataType, value: Any) -> Any:
    """Return a value of `to_pylist` with its JSON text parsed."""
    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return parse_json(where, value) if kind.extension_name == _JSON else value
    if is_type.is_map(kind):
        return {name: _parsed(where, kind.item_type, own) for name, own in value.items()}
    if is_type.is_struct(kind):
        return {name: _parsed(where, kind.field(name).type, own) for name, own in value.items()}
    return [_parsed(where, kind.value_type, own) for own in value] if kind.num_fields else value


def _plain_type(where: str, field: pa.Field) -> pa.DataType:
    """Return the type of a column to convert its values from; DataError where it has none.

    Nanoseconds, which Python's types lack, become microseconds.
    """
    kind, given = field.type, (field.metadata or {}).get(b"ARROW:extension:name", b"")
    is_extension = isinstance(kind, pa.BaseExtensionType)
    name = kind.extension_name if is_extension else given.decode("utf-8", "replace")
    if name and not (is_extension and name in _EXTENSIONS) and not name.startswith(_ARRAYS):
        raise _no_plain_value(f"{where} has the extension type {name!r}")
    if is_extension:
        return kind
    if is_type.is_dictionary(kind) or is_type.is_run_end_encoded(kind):
        return _plain_type(where, pa.field("", kind.value_type))
    if is_type.is_union(kind) or is_type.is_interval(kind):
        raise _no_plain_value(f"{where} has the type {kind}")
    if is_type.is_map(kind):
        key, item = (_plain_type(where, own) for own in (kind.key_field, kind.item_field))
        if key not in (pa.string(), pa.large_string(), pa.string_view()):
            raise _no_plain_value(f"{where} has a map whose keys are not texts, {kind}")
        return pa.map_(key, item)
    if kind.num_fields:
        fields = [kind.field(i) for i in range(kind.num_fields)]
        plain = [own.with_type(_plain_type(where, own)) for own in fields]
        if plain == fields:
            return kind
        if is_type.is_struct(kind):
            return pa.struct(plain)
        is_fixed = is_type.is_fixed_size_list(kind)
        return pa.list_(plain[0], kind.list_size) if is_fixed else pa.large_list(plain[0])
    if is_type.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    return {pa.duration("ns"): pa.duration("us"), pa.time64("ns"): pa.time64("us")}.get(kind, kind)


def _no_plain_value(what: str) -> DataError:
    return DataError(f"{what}, which has no plain value here; remove the column, or cast it")
