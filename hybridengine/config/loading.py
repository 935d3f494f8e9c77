"""YAML and overrides → a checked configuration; all that is wrong with it is one error."""

from __future__ import annotations

import functools
import itertools
import re
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from yaml import YAMLError

from hybridengine.config.aliases import RL_NAMES, SFT_NAMES
from hybridengine.config.errors import ConfigError, ConfigNote
from hybridengine.config.names import Settings
from hybridengine.config.schema import GRPOConfig, JobConfig
from hybridengine.config.sft import SFTConfig
from hybridengine.config.types import Options
from hybridengine.config.validation import faults

__all__ = ["PPO", "config_to_yaml", "keys_of", "load_config", "load_sft_config"]

# What `hybridengine ppo` takes by default.
PPO = {
    "algorithm.adv_estimator": "gae",
    "trainer.default_local_dir": "runs/ppo",
    "trainer.experiment_name": "ppo",
}
_REQUIRED = ("model.path", "data.train_files")
_KINDS = {GRPOConfig: ("grpo", RL_NAMES), SFTConfig: ("sft", SFT_NAMES)}


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> GRPOConfig:
    """Read a YAML file (None: defaults only), apply `key=value` overrides, check everything.

    defaults: native key → value, in place of the schema's own. A key of verl's without effect here
    is a ConfigNote warning. Raises ConfigError with every fault at once: an unreadable file,
    unknown keys, wrong types or ranges, and settings that contradict each other.
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


_NAMED = re.compile(r"[\w.]*\w")  # keys in a sentence
_adapter = functools.cache(TypeAdapter)


def _load(schema: Any, path: Any, overrides: Sequence[str], defaults: Mapping[str, Any]) -> Any:
    kind, names = _KINDS[schema]
    keys = dict(keys_of(schema))
    free = frozenset(key for key, hint in keys.items() if hint == Options)
    given = Settings(kind, names, frozenset(keys), free, dict(defaults))
    if path is not None:
        given.take(_read_file(path), str(path))
    given.take(_read_overrides(overrides, given.faults), "the command line")
    for key in _REQUIRED:
        if not given.values.get(key) and key not in given.doubtful:
            given.faults.append(f"{key} is required and was not given; set it in the config")
            given.doubtful.add(key)
    config = _validated(schema, given)
    crossed = itertools.chain(faults(config), given.check_shared(config))
    given.faults += [f for f in crossed if not given.doubtful & set(_NAMED.findall(f))]
    if given.faults:
        raise ConfigError(*given.faults)
    for reason, ignored in given.notes.items():
        warnings.warn(f"ignored: {', '.join(ignored)} ({reason})", ConfigNote, stacklevel=3)
    return config


def _validated(schema: Any, given: Settings) -> Any:
    """The configuration, with the defaults in place of values of a wrong type or range."""
    while True:
        tree: dict[str, Any] = {}
        for key, value in given.values.items():
            *groups, leaf = key.split(".")
            functools.reduce(lambda node, name: node.setdefault(name, {}), groups, tree)[leaf] = (
                value
            )
        try:
            return _adapter(schema).validate_python(tree)
        except ValidationError as error:
            for key, message in _messages(error, given.values).items():
                given.faults.append(f"{key} is {given.values.pop(key)!r}: {message}")
                given.doubtful.add(key)


def _messages(error: ValidationError, values: Mapping[str, Any]) -> dict[str, str]:
    """By key, the first thing that is wrong with its value."""
    found: dict[str, str] = {}
    for fault in error.errors():
        paths = itertools.accumulate(map(str, fault["loc"]), "{}.{}".format)
        key = next(path for path in paths if path in values)
        found.setdefault(key, f"{fault['msg'][0].lower()}{fault['msg'][1:]}")
    return found


def _read_overrides(overrides: Sequence[str], faults: list[str]) -> Mapping[str, Any]:
    """`key=value`, with Hydra's `+` and `++` before the key; what is no such pair is a fault."""
    pairs = []
    for override in overrides:
        key, equals, _ = override.partition("=")
        if override.startswith("~"):
            faults.append(f"override {override!r} would remove a key; set {key[1:]}=null instead")
        elif not equals or not key.strip("+"):
            faults.append(f"override {override!r} is not `key=value`, e.g. actor.optim.lr=1e-6")
        else:
            pairs.append(override.lstrip("+"))
    return _read(lambda: OmegaConf.from_dotlist(pairs), f"overrides {pairs}")


def _read_file(path: str | Path) -> Mapping[str, Any]:
    path = Path(path).expanduser()
    return _read(lambda: OmegaConf.load(path), f"config file {path}")


def _read(read: typing.Callable[[], Any], what: str) -> Mapping[str, Any]:
    try:
        content = OmegaConf.to_container(read(), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{what} does not exist; check the path") from None
    except (OSError, YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{what} cannot be read as YAML: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{what} must hold `key: value` groups, not a list")
    return typing.cast("Mapping[str, Any]", content)
