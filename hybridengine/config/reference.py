"""Every key with its type, default and meaning, read from the schema and the comments in it."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, is_dataclass
from typing import Any, Literal

import annotated_types
from rich.table import Table
from rich.text import Text

from hybridengine.config.errors import ConfigError
from hybridengine.config.loading import PPO
from hybridengine.config.schema import GRPOConfig
from hybridengine.config.sft import SFTConfig
from hybridengine.config.types import Options

__all__ = ["Key", "key_reference", "key_table"]

_KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "grpo": (GRPOConfig, {}),
    "ppo": (GRPOConfig, PPO),
    "sft": (SFTConfig, {}),
}


@dataclass(frozen=True)
class Key:
    name: str
    type: str
    default: str
    meaning: str


def key_reference(kind: str) -> list[Key]:
    """The keys of `grpo`, `ppo` or `sft`; ConfigError for another kind."""
    if kind not in _KINDS:
        raise ConfigError(f"kind is {kind!r}, expected one of {', '.join(_KINDS)}")
    schema, defaults = _KINDS[kind]
    return list(_keys(schema, "", defaults))


def key_table(kind: str, containing: str = "") -> Table:
    """`key_reference` to print, a line a key; only those whose name contains `containing`."""
    table = Table("key", "type", "default", "meaning", box=None, pad_edge=False)
    for key in key_reference(kind):
        if containing in key.name:
            table.add_row(*map(Text, astuple(key)))
    return table


def _keys(group: type, prefix: str, defaults: dict[str, Any]) -> Iterator[Key]:
    hints = typing.get_type_hints(group, include_extras=True)
    plain, meanings, instance = typing.get_type_hints(group), _comments(group), group()
    for f in fields(group):
        name = f"{prefix}{f.name}"
        if is_dataclass(plain[f.name]):
            yield from _keys(typing.cast("type", plain[f.name]), f"{name}.", defaults)
        else:
            default = defaults.get(name, getattr(instance, f.name))
            yield Key(name, _type(hints[f.name]), _value(default), meanings.get(f.name, ""))


def _comments(group: type) -> dict[str, str]:
    """By field, the comment on its last line, of the class that defines it last."""
    found: dict[str, str] = {}
    for base in reversed(group.__mro__):
        if not is_dataclass(base):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                comment = comments.get(node.end_lineno or 0, "").replace("# fmt: skip", "")
                found[node.target.id] = comment.strip("# ")
    return found


def _type(hint: Any) -> str:
    """A type as a person writes it: `int >= 1 or null`, `constant | linear | cosine`."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        limits = [limit for part in parts[1:] for limit in _limits(part)]
        return " ".join([_type(parts[0]), *limits])
    if hint == Options:
        return "mapping"
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin is tuple:
        kinds = [_type(part) for part in parts if part is not ...]
        return f"list of {kinds[0]}" if ... in parts else f"[{', '.join(kinds)}]"
    if parts:  # a union
        return " or ".join(_type(part) for part in parts)
    return "null" if hint is type(None) else hint.__name__


def _limits(part: Any) -> Iterator[str]:
    for limit in getattr(part, "metadata", ()):
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if isinstance(limit, annotated_types.BaseMetadata) and hasattr(limit, name):
                yield f"{sign} {getattr(limit, name)}"


def _value(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, tuple | list):
        return f"[{', '.join(map(_value, default))}]"
    return str(default) if default != "" else '""'
