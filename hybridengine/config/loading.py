"""YAML and overrides → a checked configuration; every refusal is one line."""

from __future__ import annotations

import difflib
import functools
import itertools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from yaml import YAMLError

from hybridengine.config.aliases import ALIASES, REPLACED, SFT_ALIASES, SFT_REPLACED
from hybridengine.config.checks import faults
from hybridengine.config.schema import GRPOConfig, JobConfig
from hybridengine.config.sft import SFTConfig

__all__ = ["PPO", "ConfigError", "config_to_yaml", "keys_of", "load_config", "load_sft_config"]

PPO = {"algorithm.adv_estimator": "gae"}  # what `hybridengine ppo` takes by default
_REQUIRED = ("model.path", "data.train_files")
_NAMES = {GRPOConfig: (ALIASES, REPLACED), SFTConfig: (SFT_ALIASES, SFT_REPLACED)}


class ConfigError(ValueError):
    """A configuration that cannot run; one line: key, given, expected, what to do."""


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> GRPOConfig:
    """Read a YAML file (None: defaults only), apply `key=value` overrides, check everything.

    defaults: native key → value, in place of the schema's own. Raises ConfigError for an unreadable
    file, an unknown key, a wrong type or range, and settings that contradict each other.
    """
    return _load(GRPOConfig, path, overrides, defaults)


def load_sft_config(path: str | Path | None, overrides: Sequence[str] = ()) -> SFTConfig:
    """As `load_config`, for `hybridengine sft`."""
    return _load(SFTConfig, path, overrides, {})


def config_to_yaml(config: JobConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(typing.cast("Any", config))))


def keys_of(group: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a config class with its type."""
    hints = typing.get_type_hints(group)
    for f in fields(group):
        if is_dataclass(hints[f.name]):
            yield from keys_of(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", hints[f.name]


_adapter = functools.cache(TypeAdapter)


def _load(schema: Any, path: Any, overrides: Sequence[str], defaults: Mapping[str, Any]) -> Any:
    values = dict(defaults)
    if path is not None:
        values |= _native_keys(_read(path), str(path), schema)
    values |= _native_keys(_read(overrides), "the command line", schema)
    for key in _REQUIRED:
        if not values.get(key):
            raise ConfigError(f"{key} is required and was not given; set it in the config")
    tree = OmegaConf.create()
    for key, value in values.items():
        OmegaConf.update(tree, key, value)
    try:
        config = _adapter(schema).validate_python(OmegaConf.to_container(tree))
    except ValidationError as error:
        raise ConfigError(_first_line(error, values)) from None
    for fault in faults(config):
        raise ConfigError(fault)
    return config


def _read(source: Any) -> Mapping[str, Any]:
    """A YAML file, or a list of overrides."""
    is_file = isinstance(source, str | Path)
    what = f"config file {source}" if is_file else f"overrides {source}"
    for override in [] if is_file else source:
        if not override.partition("=")[1] or override.startswith("="):
            raise ConfigError(f"override {override!r} is not `key=value`, e.g. actor.optim.lr=1e-6")
    try:
        read = OmegaConf.load(source) if is_file else OmegaConf.from_dotlist(list(source))
        content = OmegaConf.to_container(read, resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{what} does not exist; check the path") from None
    except (OSError, YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{what} cannot be read as YAML: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{what} must hold `key: value` groups, not a list")
    return typing.cast("Mapping[str, Any]", content)


def _native_keys(tree: Mapping[str, Any], source: str, schema: type) -> dict[str, Any]:
    """Flatten to {native dotted key: value}; rejects unknown keys and keys given twice."""
    aliases, replaced = _NAMES[schema]
    known = {key for key, _ in keys_of(schema)}
    values: dict[str, Any] = {}
    for given, value in _leaves(tree):
        key = _resolve_alias(given, aliases)
        if key in replaced:
            raise ConfigError(f"{given} (in {source}) is not a key here: {replaced[key]}")
        if any(k.startswith(f"{key}.") for k in known):
            raise ConfigError(f"{given} (in {source}) is a group of keys, not {value!r}")
        if key not in known:
            raise ConfigError(f"{given} (in {source}) is not a known key; {_suggest(key, known)}")
        if key in values:
            raise ConfigError(f"{key} is given twice in {source}, once under verl's name; keep one")
        values[key] = value
    return values


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _resolve_alias(key: str, aliases: Mapping[str, str]) -> str:
    for alias in sorted(aliases, key=len, reverse=True):
        if f"{key}.".startswith(f"{alias}."):
            return aliases[alias] + key[len(alias) :]
    return key


def _suggest(key: str, known: set[str]) -> str:
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [k for k in sorted(known) if k.rsplit(".", 1)[-1] == leaf]
    close = same_leaf or difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"the groups are {', '.join(sorted({k.split('.', 1)[0] for k in known}))}"


def _first_line(error: ValidationError, values: Mapping[str, Any]) -> str:
    first = error.errors()[0]
    parts = map(str, first["loc"])
    key = next(k for k in itertools.accumulate(parts, "{}.{}".format) if k in values)
    return f"{key} is {values[key]!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
