"""Messages between processes: msgpack that is decoded as the type its reader expects.

Reading one runs no code: a type holds numbers, texts, lists, mappings, dataclasses and tensors, and
whatever else a message contains is an error.
"""

from __future__ import annotations

import math
from array import array
from functools import cache
from pathlib import PurePath
from types import ModuleType
from typing import Any

import numpy as np
import torch

__all__ = ["MessageError", "decode", "encode"]

_DTYPES = {str(x)[6:]: x for x in vars(torch).values() if isinstance(x, torch.dtype)}


class MessageError(RuntimeError):
    """A message is not from this run, or is not what its reader expects."""


def encode(value: object) -> bytes:
    """Return the message of a value.

    Dataclasses, named tuples, numbers, texts, bytes, lists, tuples, sets and mappings of these, and
    data types, paths, ranges, arrays and tensors, which arrive on the CPU.
    """
    message: bytes = _msgspec().msgpack.encode(value, enc_hook=_to_plain)
    return message


def decode(message: Any, expected: Any, what: str) -> Any:
    """Return the value of a message, of type `expected`.

    message: bytes, or another buffer.
    what: names the message in a MessageError.
    """
    try:
        return _decoder(expected).decode(message)
    except (_msgspec().MsgspecError, ValueError, TypeError, KeyError) as error:
        raise MessageError(f"{what} is no {expected}: {error}") from None


@cache
def _decoder(expected: Any) -> Any:
    return _msgspec().msgpack.Decoder(expected, dec_hook=_from_plain)


@cache
def _msgspec() -> ModuleType:
    try:
        import msgspec
    except ImportError:
        raise ImportError(
            "ranks exchange messages by the package msgspec, which is not installed: run "
            "`pip install msgspec`; the extra `train` and vLLM contain it",
            name="msgspec",
        ) from None
    return msgspec


def _to_plain(value: Any) -> object:
    """Return what msgpack stores of a value that msgspec does not know."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return _name(value.dtype), tuple(value.shape), data
    if isinstance(value, torch.dtype):
        return _name(value)
    if isinstance(value, range):
        return value.start, value.stop, value.step
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, array | np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a message cannot contain a {type(value).__name__}")


def _from_plain(expected: Any, value: Any) -> object:
    """Return the value of a type that msgspec does not know; the inverse of `_to_plain`."""
    if expected is torch.Tensor:
        name, shape, data = value
        dtype = _DTYPES[name]
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"a tensor {name}{shape} of {len(data)} bytes")
        tensor = torch.empty(tuple(shape), dtype=dtype)
        if data:
            tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
        return tensor
    if expected is torch.dtype:
        return _DTYPES[value]
    if expected is range:
        return range(*value)
    if isinstance(expected, type) and issubclass(expected, PurePath):
        return expected(value)
    raise TypeError(f"{expected} is no type of a message")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
