"""YAML and overrides → a checked configuration.

Keys are flattened, renamed to native ones (`config.aliases`), checked by pydantic one by one and by
`config.validation` against each other. All faults are raised as one ConfigError.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from operator import attrgetter, getitem
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from hybridengine.keys.aliases import RL_ALIASES, SFT_ALIASES, AliasTable
from hybridengine.keys.trl_names import TRL_NAMES
from hybridengine.run.config.adapter import adapter_settings
from hybridengine.run.config.common import JobConfig, Options, find_input, read_paths
from hybridengine.run.config.rl import RLConfig
from hybridengine.run.config.sft import SFTConfig
from hybridengine.run.config.simulation import SimulationConfig
from hybridengine.run.config.suggest import similar_keys
from hybridengine.run.config.validation import find_faults, find_notes
from hybridengine.run.errors import ConfigError, ConfigNote, InvalidConfigError, is_about, located

# The defaults of `hybridengine ppo` that differ from those of `hybridengine grpo`.
PPO = {
    "algorithm.adv_estimator": "gae",
    "trainer.default_local_dir": "runs/ppo",
    "trainer.experiment_name": "ppo",
}
REQUIRED = ("model.path", "data.train_files")  # keys of a job
_KINDS: dict[type, tuple[str, AliasTable, tuple[str, ...]]] = {  # name, aliases, required keys
    RLConfig: ("grpo", RL_ALIASES, REQUIRED),
    SFTConfig: ("sft", SFT_ALIASES, REQUIRED),
    SimulationConfig: ("simulate", AliasTable({}, {}, {}, {}, {}), ("model.path",)),
}
_HYDRA_KEYS = ("_target_", "hydra", "defaults")
_MESSAGES = {"tuple_type": "input should be a list"}  # of pydantic's error types, for YAML
_type_adapter = functools.cache(TypeAdapter)
_type_hints = functools.cache(  # most of the time of a load, else
    functools.partial(typing.get_type_hints, include_extras=True)
)


def load_config(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> RLConfig:
    """Read a YAML file (None: defaults only), apply `key=value` overrides, check everything.

    path, overrides: may also be mappings, nested or with dotted keys, of Python values.
    A relative path of what the job reads is looked up in the working directory, one of a file
    also in the file's folder and those above it; where it exists, it becomes absolute.
    defaults: native key → value, replaces the schema's own default.
    A key of verl without effect here is a ConfigNote warning. Raises ConfigError for an unreadable
    file, and InvalidConfigError with every other fault at once: unknown keys, wrong types or
    ranges, and settings that contradict each other.
    """
    return _load(RLConfig, path, overrides, defaults)


def load_sft_config(
    path: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> SFTConfig:
    """As `load_config`, for `hybridengine sft`."""
    return _load(SFTConfig, path, overrides, {})


JOB_LOADERS: dict[str, Callable[..., JobConfig]] = {  # by the kind of job
    "grpo": load_config,
    "ppo": functools.partial(load_config, defaults=PPO),
    "sft": load_sft_config,
}


def load_simulation_config(
    path: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> SimulationConfig:
    """As `load_config`, for `hybridengine simulate`."""
    return _load(SimulationConfig, path, overrides, {})


def parse_overrides(overrides: Sequence[str]) -> Mapping[str, Any]:
    """Return key → value of a list of `key=value`, in order. Raises ConfigError for other texts."""
    faults: list[str] = []
    settings = _read_overrides(overrides, faults)
    if faults:
        raise ConfigError(*faults)
    return settings


def read_settings(file: Path) -> Mapping[str, Any]:
    """Return the content of a YAML file of settings. Raises ConfigError if it cannot be read."""
    return _read(lambda: OmegaConf.load(file), f"config file {located(file)}")


def config_to_yaml(config: JobConfig) -> str:
    """Return the resolved configuration as YAML; `load_config` reads it back to an equal one."""
    # As `OmegaConf.to_yaml`, without a node for each value, which takes ten times as long.
    content, dumper = asdict(typing.cast("Any", config)), get_omega_conf_dumper()
    text: str = yaml.dump(content, Dumper=dumper, allow_unicode=True, sort_keys=False)
    return text


def keys_of(group: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a config class with its type."""
    hints = _type_hints(group)
    for f in fields(group):
        if is_dataclass(hints[f.name]):
            yield from keys_of(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", hints[f.name]


def _load(schema: Any, path: Any, overrides: Any, defaults: Mapping[str, Any]) -> Any:
    kind, aliases, required = _KINDS[schema]
    types = dict(keys_of(schema))
    free = frozenset(key for key, hint in types.items() if hint == Options)
    given = _Settings(kind, aliases, frozenset(types), free, read_paths(types), dict(defaults))
    if isinstance(path, Mapping):
        given.add(path, "the configuration")
    elif path is not None:
        file = Path(path).expanduser()
        given.add(read_settings(file), str(path), folders=Path(os.path.abspath(file)).parents)
    if isinstance(overrides, Mapping):
        given.add(overrides, "overrides", last_wins=True)
    else:
        settings = _read_overrides(overrides, given.faults)
        given.add(settings, "the command line", last_wins=True)
    for key in required:
        if not given.values.get(key) and key not in given.faulty_keys:
            given.values.pop(key, None)
            given.add_fault(f"{key} is required and was not given; set it in the config", key)
    given.add_adapter()
    config = _validate(schema, given)
    crossed = itertools.chain(find_faults(config), given.shared_faults(config))
    given.faults += [fault for fault in crossed if not is_about(fault, given.faulty_keys)]
    if given.faults:
        keys = given.faulty_keys - given.values.keys()
        raise InvalidConfigError(config, keys, *given.faults)
    for note in find_notes(config):
        warnings.warn(note, ConfigNote, stacklevel=3)
    for reason, ignored in given.notes.items():
        warnings.warn(f"ignored: {', '.join(ignored)} ({reason})", ConfigNote, stacklevel=3)
    return config


def _read_overrides(overrides: Sequence[str], faults: list[str]) -> dict[str, Any]:
    """Return the value of each `key=value`, in the order of the last settings of the keys.

    Hydra's `+` and `++` before a key are dropped. Appends to `faults` what is no such pair.
    """
    pairs = dict[str, str]()
    for override in overrides:
        key, equals, _ = override.partition("=")
        if override.startswith("~"):
            faults.append(f"override {override!r} would remove a key; set {key[1:]}=null instead")
        elif "[" in key:
            faults.append(f"override {override!r} sets an entry of a list; give the full list")
        elif not equals or not key.strip("+"):
            faults.append(f"override {override!r} is not `key=value`, e.g. actor.optim.lr=1e-6")
        else:
            pairs.pop(key.lstrip("+"), None)
            pairs[key.lstrip("+")] = override.lstrip("+")
    dotlist = list(pairs.values())
    tree = _read(lambda: OmegaConf.from_dotlist(dotlist), f"overrides {dotlist}")
    values = {}
    for key in pairs:
        with contextlib.suppress(KeyError, TypeError):  # a later override replaced its group
            values[key] = functools.reduce(getitem, key.split("."), tree)
    return values


def _read(read: Callable[[], Any], what: str) -> Mapping[str, Any]:
    try:
        content = OmegaConf.to_container(read(), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{what} does not exist; check the path") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{what} cannot be read as YAML: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{what} must hold `key: value` groups, not a list")
    return typing.cast("Mapping[str, Any]", content)


@dataclass
class _Settings:
    """What files and overrides set, by native key, and what is wrong with it.

    known: all native keys; free: those whose value is a mapping with keys of any name.
    paths: keys of what a job reads → a part of every value that is a path.
    values: native key → value.
    faults: one line each.
    faulty_keys: native keys that a fault is about; further faults about them would only repeat it.
    notes: reason → keys without effect.
    """

    kind: str
    aliases: AliasTable
    known: frozenset[str]
    free: frozenset[str]
    paths: Mapping[str, str]
    values: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    faulty_keys: set[str] = field(default_factory=set)
    notes: dict[str, list[str]] = field(default_factory=dict)
    _shared: list[tuple[str, str, Any]] = field(default_factory=list)

    def add(
        self,
        tree: Mapping[str, Any],
        source: str,
        last_wins: bool = False,
        folders: Sequence[Path] = (),
    ) -> None:
        """Add the settings of one source; they replace those of earlier sources.

        last_wins: whether the last of two names of one key counts; otherwise both are a fault.
        folders: those of relative paths, after the working directory.
        """
        here: dict[str, tuple[str, Any]] = {}
        for given, value in _leaves(tree, self.free):
            key, value = self.aliases.native(given), _as_text(value)
            key, value = self._in_mapping(key, value)
            if key in self.paths:
                value = find_input(value, self.paths[key], folders)
            if key in self.free and isinstance(value, Mapping):
                merged = OmegaConf.merge(self.values.get(key) or {}, value)
                self.values[key] = OmegaConf.to_container(merged)
            elif key not in self.known:
                self._add_foreign(given, key, value, source)
            elif value is None and given != key:  # verl's "not set"
                continue
            elif key in here and here[key][1] not in (None, value) and not last_wins:
                both = f"{here[key][0]} and {given}"
                self.add_fault(f"{key} is given twice in {source}, as {both}; keep one", key)
            else:
                here[key] = (given, self._translated(key, value))
        self.values |= {key: value for key, (_, value) in here.items()}

    def add_adapter(self) -> None:
        """Add what the initial adapter sets; a setting that contradicts it is a fault.

        Targets may be given in other words; `apply_lora` compares the layers themselves.
        """
        key = "model.lora_adapter_path"
        if not isinstance(path := self.values.get(key), str):
            return
        try:
            settings = adapter_settings(path)
        except ConfigError as error:
            self.add_fault(str(error), key)
            return
        for name, value in settings.items():
            own = self.values.get(name) or value
            if own != value and name not in ("model.target_modules", "model.target_parameters"):
                self.add_fault(
                    f"{name} is {own}, but the adapter of {key} {path!r} has {value}; leave {name} "
                    "out",
                    name,
                )
            self.values[name] = own

    def _in_mapping(self, key: str, value: Any) -> tuple[str, Any]:
        """Return the setting of one entry of a mapping as that of the mapping."""
        for free in self.free:
            if key.startswith(f"{free}."):
                return free, _nested({key.removeprefix(f"{free}."): value})
        return key, value

    def _translated(self, key: str, value: Any) -> Any:
        """Return the native value of one that has another name in verl, and note it."""
        native, reason = self.aliases.values.get(f"{key}={value}", (value, ""))
        if reason:
            self.notes.setdefault(reason, []).append(f"{key}={value}")
        return native

    def add_fault(self, text: str, *keys: str) -> None:
        self.faults.append(text)
        self.faulty_keys.update(keys)

    def shared_faults(self, config: Any) -> Iterator[str]:
        """Yield a fault for each key whose value has to equal that of another key and does not."""
        for given, ours, value in self._shared:
            own = attrgetter(ours)(config)
            equal = (own, list(own)) if isinstance(own, tuple) else (own,)
            if own != "auto" and value not in equal:
                yield f"{given} is {value!r}, but it is one setting with {ours}, which is {own!r}"

    def _add_foreign(self, given: str, key: str, value: Any, source: str) -> None:
        """Classify a key that is not native as fixed, shared, refused, ignored or unknown."""
        table, where = self.aliases, f"{given} (in {source})"
        if rule := _match(table.fixed, given, key):
            accepted, reason = rule
            if value is not None and not any(_same(value, a) for a in accepted):
                advice = "" if "set " in reason else "; leave it out"
                self.add_fault(f"{where} is {value!r}, which cannot be set here: {reason}{advice}")
            else:
                self.notes.setdefault(reason, []).append(given)
        elif ours := _match(table.shared, given, key):
            if value is not None:
                self._shared.append((given, ours, value))
        elif reason := _match(table.refused, given, key):
            if value is not None:
                self.add_fault(f"{where} is not a key here: {reason}")
        elif reason := _match(table.ignored, given, key):
            self.notes.setdefault(reason, []).append(given)
        elif group := [k for k in self.known if k.startswith(f"{key}.")]:
            self.add_fault(f"{where} is a group of keys, not {value!r}", *group)
        else:
            trl = TRL_NAMES.get(self.kind, {}).get(key)
            close = list(trl) if trl else similar_keys(key, self._names())
            self.add_fault(f"{where} is not a known key; {self._advice(key, close)}", *close)

    def _names(self) -> dict[str, str]:
        """Return all native keys and their other names, each with its native key."""
        others = {}
        for alias, key in self.aliases.aliases.items():
            group, _, leaf = alias.rpartition(".")
            if key in self.known:
                others[f"{self.aliases.native(group)}.{leaf}"] = key
        return others | {key: key for key in sorted(self.known)}

    def _advice(self, key: str, close: list[str]) -> str:
        if close:
            return f"did you mean {' or '.join(close)}?"
        groups = sorted({k.split(".", 1)[0] for k in self.known if "." in k})
        if key.split(".", 1)[0] not in groups:
            return f"the groups are {', '.join(groups)}"
        return f"`hybridengine keys {self.kind}` lists them"


def _leaves(
    tree: Mapping[str, Any], free: frozenset[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of a tree; the value of a key in `free` is a whole mapping."""
    for name, value in tree.items():
        if name in _HYDRA_KEYS:
            continue
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not any(f".{key}".endswith(f".{f}") for f in free):
            yield from _leaves(value, free, f"{key}.")
        else:
            yield key, value


def _as_text(value: Any) -> Any:
    """Return a path, or each path of a list, as text."""
    if isinstance(value, list | tuple):
        return [_as_text(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _match(table: Mapping[str, Any], *keys: str) -> Any:
    for patterns, entry in table.items():
        if any(fnmatchcase(key, pattern) for pattern in patterns.split() for key in keys):
            return entry
    return None


def _same(value: Any, accepted: Any) -> bool:
    """Whether both are equal and both or neither a bool: 1 is not True."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


def _validate(schema: Any, given: _Settings) -> Any:
    """Return the configuration, with defaults in place of values of a wrong type or range."""
    while True:
        try:
            return _type_adapter(schema).validate_python(_nested(given.values))
        except ValidationError as error:
            for key, message in _messages(error, given.values).items():
                given.add_fault(f"{key} is {given.values.pop(key)!r}: {message}", key)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *groups, leaf = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[leaf] = value
    return tree


def _messages(error: ValidationError, values: Mapping[str, Any]) -> dict[str, str]:
    """Return, by key, pydantic's first message about its value."""
    messages: dict[str, str] = {}
    for fault in error.errors():
        paths = itertools.accumulate(map(str, fault["loc"]), "{}.{}".format)
        key = next(path for path in paths if path in values)
        message = _MESSAGES.get(fault["type"], fault["msg"])
        messages.setdefault(key, f"{message[0].lower()}{message[1:]}")
    return messages
