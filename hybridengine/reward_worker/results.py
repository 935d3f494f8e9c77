"""What a reward function returned, as finite numbers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

__all__ = ["shorten", "to_numbers", "to_rows"]

_SHOWN = 200  # characters of a value in a message


def to_rows(results: Any, wanted: int) -> list[Any]:
    """Return the results of a function that was called with lists of `wanted` responses.

    Raises ValueError where it is not a sequence with one result each.
    """
    if hasattr(results, "tolist"):
        results = results.tolist()  # an array or a tensor
    is_list = isinstance(results, Sequence) and not isinstance(results, str | bytes)
    if not is_list or len(results) != wanted:
        given = f"{len(results)} results" if is_list else f"{type(results)}"
        raise ValueError(f"gave {given} for {wanted} responses; expected a list with one each")
    return list(results)


def to_numbers(result: Any) -> dict[str, float]:
    """Return "score" and the further numbers of one result; texts are left out, but for "pred".

    "pred" is the answer that majority votes count; of a text a number that stands for it.

    result: a number (also a NumPy scalar or a tensor with one element), or a mapping with "score".

    Raises ValueError for anything that is not a finite number.
    """
    given = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in given:
        raise ValueError(f"gave a dict without 'score' (keys {sorted(map(str, given))})")
    numbers = {}
    for name, value in given.items():
        number = _finite(value)
        if number is not None:
            numbers[str(name)] = number
        elif name == "pred" and isinstance(value, str):
            numbers["pred"] = float(zlib.crc32(value.encode(errors="surrogatepass")))
        elif name == "score" or not isinstance(value, str):
            what = repr(name) if given is result else "its result"
            kind = type(value).__name__
            raise ValueError(f"{what} is {shorten(value)} ({kind}), expected a finite number")
    return numbers


def _finite(value: Any) -> float | None:
    if not isinstance(value, Real) and getattr(value, "size", None) is not None:
        try:
            value = value.item()  # a NumPy scalar, or an array or tensor with one element
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return None
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except (OverflowError, ValueError):  # an integer above 1.8e308
        return None
    return number if math.isfinite(number) else None


def shorten(value: Any) -> str:
    """Return repr(value), cut; a value without one (an integer of 5,000 digits) by its type."""
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__}: {type(error).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}…{text[-_SHOWN // 2 :]}"
