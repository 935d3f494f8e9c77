"""List every key with its type, default and meaning, for `hybridengine keys`.

The type comes from pydantic's JSON schema, the meaning is the comment at the end of the key's line.
"""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from rich.table import Table
from rich.text import Text

from hybridengine.run.config.loading import PPO
from hybridengine.run.config.rl import RLConfig
from hybridengine.run.config.sft import SFTConfig
from hybridengine.run.config.simulation import SimulationConfig
from hybridengine.run.errors import ConfigError

_KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "grpo": (RLConfig, {}),
    "ppo": (RLConfig, PPO),
    "sft": (SFTConfig, {}),
    "simulate": (SimulationConfig, {}),
}
_TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "str"}
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


class Key(NamedTuple):
    name: str
    type: str
    default: str
    meaning: str


def key_reference(kind: str) -> list[Key]:
    """Return the keys of `grpo`, `ppo`, `sft` or `simulate`; ConfigError for another kind."""
    if kind not in _KINDS:
        raise ConfigError(f"kind is {kind!r}, expected one of {', '.join(_KINDS)}")
    schema, defaults = _KINDS[kind]
    return list(_keys(schema, "", defaults))


def key_table(kind: str, containing: str = "") -> Table:
    """Return `key_reference` as a table, with the keys whose name contains `containing`."""
    table = Table("key", "type", "default", "meaning", box=None, pad_edge=False)
    for key in key_reference(kind):
        if containing in key.name:
            table.add_row(*map(Text, key))
    return table


def _keys(group: type, prefix: str, defaults: dict[str, Any]) -> Iterator[Key]:
    hints = typing.get_type_hints(group, include_extras=True)
    meanings, instance = _comments(group), group()
    for f in fields(group):
        name = f"{prefix}{f.name}"
        if is_dataclass(hints[f.name]):
            yield from _keys(hints[f.name], f"{name}.", defaults)
        else:
            type_ = _type_text(TypeAdapter(hints[f.name]).json_schema())
            default = defaults.get(name, getattr(instance, f.name))
            yield Key(name, type_, _value_text(default), meanings.get(f.name, ""))


def _comments(group: type) -> dict[str, str]:
    """Return, by field, the comment at the end of its definition, inherited ones included."""
    comments: dict[str, str] = {}
    for base in reversed(group.__mro__):
        if not is_dataclass(base):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        by_line = {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                comment = by_line.get(node.end_lineno or 0, "")
                comments[node.target.id] = comment.strip("# ")
    return comments


def _type_text(schema: dict[str, Any]) -> str:
    """Describe a JSON schema in words: `int >= 1 or null`, `constant | linear | cosine`."""
    if "anyOf" in schema:
        return " or ".join(map(_type_text, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "prefixItems" in schema:
        return f"[{', '.join(map(_type_text, schema['prefixItems']))}]"
    if schema["type"] == "array":
        return f"list of {_type_text(schema['items'])}"
    if schema["type"] == "object":
        return "mapping"
    limits = [f"{sign} {schema[name]}" for name, sign in _LIMITS.items() if name in schema]
    return " ".join([_TYPES.get(schema["type"], schema["type"]), *limits])


def _value_text(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, tuple | list):
        return f"[{', '.join(map(_value_text, default))}]"
    return str(default) if default != "" else '""'
