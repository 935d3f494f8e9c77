"""The list of all keys of a job: name, type, default and meaning."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from rich.table import Table
from rich.text import Text

from hybridengine.run.config.loading import job_kind

__all__ = ["Key", "key_reference", "key_table"]

_TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "str"}
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_MEANING = re.compile(r"^ {4}(\w+): .*  # (.+)$", re.MULTILINE)  # of a field, after its default


class Key(NamedTuple):
    name: str
    type: str
    default: str
    meaning: str


def key_reference(kind: str) -> list[Key]:
    """Return the keys of a kind of job, such as `grpo`; ConfigError for an unknown one."""
    job = job_kind(kind)
    return list(_keys(job.schema, "", job.defaults))


def key_table(kind: str, containing: str = "") -> Table:
    """Return `key_reference` as a table, with the keys whose name contains `containing`."""
    table = Table("key", "type", "default", "meaning", box=None, pad_edge=False)
    for key in key_reference(kind):
        if containing in key.name:
            table.add_row(*map(Text, key))
    return table


def _keys(group: type, prefix: str, defaults: Mapping[str, Any]) -> Iterator[Key]:
    hints = typing.get_type_hints(group, include_extras=True)
    bases = [base for base in reversed(group.__mro__) if is_dataclass(base)]
    meanings = {n: m for base in bases for n, m in _MEANING.findall(inspect.getsource(base))}
    instance = group()
    for f in fields(group):
        name = f"{prefix}{f.name}"
        if is_dataclass(hints[f.name]):
            yield from _keys(hints[f.name], f"{name}.", defaults)
        else:
            type_ = _type_text(TypeAdapter(hints[f.name]).json_schema())
            default = defaults.get(name, getattr(instance, f.name))
            yield Key(name, type_, _value_text(default), meanings.get(f.name, ""))


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
