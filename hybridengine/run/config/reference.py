"""Print a configuration: as YAML, as a command, and the list of all keys.

In the list, the type of a key comes from pydantic's JSON schema, and its meaning is the comment at
the end of its line.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import textwrap
import tokenize
import typing
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from pydantic import TypeAdapter
from rich.table import Table
from rich.text import Text

from hybridengine.run.config.common import JobConfig, keys_of
from hybridengine.run.config.loading import REQUIRED, job_kind, load_job
from hybridengine.run.errors import ConfigNote

__all__ = ["Key", "config_to_yaml", "key_reference", "key_table", "overrides_of"]

_TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "str"}
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def config_to_yaml(config: JobConfig) -> str:
    """Return the resolved configuration as YAML; `load_config` reads it back to an equal one."""
    # As `OmegaConf.to_yaml`, without a node for each value, which takes ten times as long.
    content, dumper = asdict(typing.cast("Any", config)), get_omega_conf_dumper()
    text: str = yaml.dump(content, Dumper=dumper, allow_unicode=True, sort_keys=False)
    return text


def overrides_of(kind: str, config: JobConfig) -> list[str]:
    """Return the `key=value` that mean `config`: the required keys, and those with no default."""
    values = {key: attrgetter(key)(config) for key, _ in keys_of(type(config))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigNote)
        default = load_job(kind, None, [f"{key}={_as_text(values[key])}" for key in REQUIRED])
    return [
        f"{key}={_as_text(value)}"
        for key, value in values.items()
        if value != attrgetter(key)(default) or key in REQUIRED
    ]


def _as_text(value: Any) -> str:
    """Return the value as it is written behind `key=`: a plain text if it is read back as such."""
    if isinstance(value, str) and "\n" not in value:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"key={value}"]))
        if read == {"key": value}:
            return value
    return json.dumps(value)


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
