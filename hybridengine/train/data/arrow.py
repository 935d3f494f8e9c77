"""Columns of parquet and Arrow files as plain Python values.

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as is_type

from hybridengine.run.errors import DataError, reason_of
from hybridengine.train.data.json_text import parse_json

__all__ = ["arrow_rows"]

_Decode = Callable[[str, Any], Any]  # (where, value of to_pylist) → plain value
_EXTENSIONS = ("arrow.json", "arrow.uuid", "arrow.bool8")
_ARRAYS = "datasets.features.features.Array"  # of datasets, 2D to 5D
_BATCH_ROWS = 1024


def arrow_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file, an Arrow stream (`datasets`), or an Arrow file.

    Raises DataError for a file that cannot be read, and for columns without a plain value.
    """
    first = 0
    with _reader(file) as (schema, batches):
        if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
            raise DataError(f"data file {file} has the column {twice[0]!r} twice")
        types = [_plain_type(f"data file {file}, column {field.name!r}", field) for field in schema]
        decoders = [_decoder(kind) for kind in types]
        for batch in batches:
            where = f"{file}, row {first} or later"
            columns = [
                _values(f"{where}: column {name!r}", *column)
                for name, *column in zip(schema.names, batch.columns, types, decoders, strict=True)
            ]
            first += batch.num_rows
            yield from (
                dict(zip(schema.names, row, strict=True)) for row in zip(*columns, strict=True)
            )


@contextmanager
def _reader(file: Path) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    what = "parquet" if file.suffix == ".parquet" else "Arrow"
    try:
        if what == "parquet":
            with pq.ParquetFile(file) as table:
                yield table.schema_arrow, table.iter_batches(batch_size=_BATCH_ROWS)
            return
        with pa.memory_map(str(file)) as source:
            batches: Iterator[pa.RecordBatch]
            if source.read(6) == b"ARROW1":
                whole = pa.ipc.open_file(source)
                schema, batches = (
                    whole.schema,
                    map(whole.get_batch, range(whole.num_record_batches)),
                )
            else:
                source.seek(0)
                stream = pa.ipc.open_stream(source)
                schema, batches = stream.schema, iter(stream)
            yield schema, map(_validated, batches)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"data file {file} is not a readable {what} file: {reason_of(error)}"
        ) from None


def _validated(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Check the offsets of a batch, which Arrow maps from the file as they are."""
    batch.validate(full=True)
    return batch


def _values(
    where: str, column: pa.Array, plain: pa.DataType, decode: _Decode | None
) -> Sequence[Any]:
    try:
        values = (column if column.type == plain else column.cast(plain)).to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(f"{where} has text that is not UTF-8: {error}") from None
    except (pa.ArrowException, ValueError, OverflowError, LookupError) as error:
        raise DataError(
            f"{where}, of type {column.type}, has a value that Python cannot hold: "
            f"{reason_of(error)}"
        ) from None
    return values if decode is None else [decode(where, value) for value in values]


def _plain_type(where: str, field: pa.Field) -> pa.DataType:
    """Return the type of a column to convert its values from; DataError where it has none."""
    kind = field.type
    name = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode("utf-8", "replace")
    if isinstance(kind, pa.BaseExtensionType):
        name = kind.extension_name
    is_known = name in _EXTENSIONS and isinstance(kind, pa.BaseExtensionType)
    if name and not is_known and not name.startswith(_ARRAYS):
        raise DataError(
            f"{where} has the extension type {name!r}, which has no plain value here; remove the "
            "column, or cast it"
        )
    if isinstance(kind, pa.BaseExtensionType):
        return kind
    if kind.num_fields and not is_type.is_run_end_encoded(kind) and not is_type.is_union(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        if is_type.is_map(kind):
            fields = [kind.key_field, kind.item_field]
        plain = [own.with_type(_plain_type(where, own)) for own in fields]
        if [own.type for own in plain] == [own.type for own in fields]:
            return kind
        if is_type.is_struct(kind):
            return pa.struct(plain)
        if is_type.is_map(kind):
            return pa.map_(plain[0].type, plain[1])
        if is_type.is_fixed_size_list(kind):
            return pa.list_(plain[0], kind.list_size)
        return pa.large_list(plain[0])
    if is_type.is_dictionary(kind) or is_type.is_run_end_encoded(kind):
        return _plain_type(where, pa.field("", kind.value_type))
    if is_type.is_union(kind) or is_type.is_interval(kind):
        raise DataError(
            f"{where} has the type {kind}, which has no plain value here; remove the column, or "
            "cast it"
        )
    if is_type.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if is_type.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    return pa.time64("us") if kind == pa.time64("ns") else kind


def _decoder(kind: pa.DataType) -> _Decode | None:
    """Return what makes a plain value of what `to_pylist` returns; None: it is one."""
    if isinstance(kind, pa.BaseExtensionType):
        return _from_json if kind.extension_name == "arrow.json" else None
    if is_type.is_map(kind):
        item = _decoder(kind.item_type)
        return lambda where, pairs: pairs if pairs is None else _from_map(where, pairs, item)
    if is_type.is_struct(kind):
        own = {kind.field(i).name: _decoder(kind.field(i).type) for i in range(kind.num_fields)}
        changed = {name: decode for name, decode in own.items() if decode is not None}
        if not changed:
            return None
        return lambda where, value: (
            value
            and {
                **value,
                **{name: decode(where, value[name]) for name, decode in changed.items()},
            }
        )
    if kind.num_fields:  # a list of any kind
        inner = _decoder(kind.value_type)
        if inner is None:
            return None
        return lambda where, value: value and [inner(where, item) for item in value]
    return None


def _from_json(where: str, text: str | None) -> Any:
    return None if text is None else parse_json(where, text)


def _from_map(where: str, pairs: list[tuple[Any, Any]], item: _Decode | None) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs) or not all(isinstance(key, str) for key in value):
        raise DataError(
            f"{where} has a map whose keys are not different texts: {[key for key, _ in pairs]!r}"
        )
    return value if item is None else {key: item(where, own) for key, own in value.items()}
