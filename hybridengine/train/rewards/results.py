"""Convert the result of a reward function to finite numbers and texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from hybridengine.run.errors import shorten


def to_rows(results: Any, size: int) -> list[Any]:
    """Return the results of one call with lists of `size` responses as a list.

    Raises ValueError for anything but a sequence with one result for each.
    """
    if hasattr(results, "tolist"):
        results = results.tolist()  # an array or a tensor
    is_list = isinstance(results, Sequence) and not isinstance(results, str | bytes)
    if not is_list or len(results) != size:
        given = f"{len(results)} results" if is_list else f"{type(results)}"
        raise ValueError(f"returned {given} for {size} responses; expected a list with one each")
    return list(results)


def to_results(result: Any) -> dict[str, float | str]:
    """Return "score", a number, and the further numbers and texts of one result, by name.

    "pred", the answer that majority votes count, is always a text.

    result: a number (NumPy scalars and tensors of one element, too), or a mapping with "score".

    Raises ValueError for anything that is neither a finite number nor a text.
    """
    given = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in given:
        raise ValueError(f"returned a dict without 'score' (keys {sorted(map(str, given))})")
    results: dict[str, float | str] = {}
    for name, value in given.items():
        number = _finite(value)
        if isinstance(value, str) and name != "score":
            results[str(name)] = to_text(value)
        elif name == "pred" and (number is not None or value is None):
            results["pred"] = to_text(number)
        elif number is not None:
            results[str(name)] = number
        else:
            what = repr(name) if given is result else "its result"
            kind = type(value).__name__
            raise ValueError(f"{what} is {show(value)} ({kind}), expected a finite number")
    return results


def to_text(value: str | float | None) -> str:
    """Return a text that can be encoded; 42.0 as 42."""
    text = value if isinstance(value, str) else str(value).removesuffix(".0")
    return text.encode(errors="backslashreplace").decode()  # half surrogate pairs


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


def show(value: Any) -> str:
    """Return repr(value), cut in the middle; its type where repr fails (an int of 5,000 digits)."""
    try:
        return shorten(repr(value), 200)
    except Exception as error:
        return f"<{type(value).__name__}: {type(error).__name__}>"
