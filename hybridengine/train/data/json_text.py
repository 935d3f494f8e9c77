"""Parse JSON text strictly: no key twice, no deep nesting, no half of a surrogate pair."""

from __future__ import annotations

import json
import re
from typing import Any

from hybridengine.run.errors import DataError

_MAX_DEPTH = 100  # of nested lists and objects
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


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
