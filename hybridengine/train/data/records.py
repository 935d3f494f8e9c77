"""Samples as bytes: msgpack, which is decoded as a sample's type and runs no code."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Generic, TypeVar
from uuid import UUID

import msgspec
from msgspec.msgpack import Ext

T = TypeVar("T")

_TUPLE = 0
_MICROSECOND = timedelta(microseconds=1)
# Values of parquet and JSON that msgpack lacks: type, to text, from text, by their code.
_TYPES: dict[int, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    1: (int, str, int),  # of more than 64 bits
    2: (Decimal, str, Decimal),
    3: (datetime, datetime.isoformat, datetime.fromisoformat),  # before date, its superclass
    4: (date, date.isoformat, date.fromisoformat),
    5: (time, time.isoformat, time.fromisoformat),
    6: (timedelta, lambda t: str(t // _MICROSECOND), lambda text: int(text) * _MICROSECOND),
    7: (UUID, str, UUID),
}


class Records(Generic[T]):
    """Encodes and decodes samples of a type: a dataclass, or Any for plain values.

    Fields are numbers, text, bytes, lists, arrays of int32, dataclasses, and values as they are in
    data files.
    """

    def __init__(self, sample_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(
            sample_type, dec_hook=_from_bytes, ext_hook=_from_extension
        )

    def encode(self, sample: T) -> bytes:
        return msgspec.msgpack.encode(_storable(sample), enc_hook=array.tobytes)

    def decode(self, record: bytes) -> T:
        """Raises ValueError for anything but a sample."""
        sample: T = self._decoder.decode(record)
        return sample


def _from_bytes(expected: Any, value: bytes) -> Any:
    return array("i", value)


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
