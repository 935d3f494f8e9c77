"""What files and overrides set, by native key, and what is wrong with it."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from hybridengine.run import plugins
from hybridengine.run.config.common import Options, find_input, keys_of, read_paths
from hybridengine.run.errors import ConfigError, located

_HYDRA_KEYS = ("_target_", "hydra", "defaults")
_MESSAGES = {"tuple_type": "input should be a list"}  # of pydantic's error types, for YAML
_ADAPTER = "model.lora_adapter_path"
# Entries of adapter_config.json whose adapter is more than W + (alpha / r) B A of every target.
_PLAIN: tuple[Any, ...] = ("", "none", None, False, [], {})
_NOT_PLAIN = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "bias", "lora_bias", "rank_pattern"),
    *("alpha_pattern", "modules_to_save", "layers_to_transform", "exclude_modules"),
    *("trainable_token_indices", "layer_replication", "alora_invocation_tokens"),
)
_type_adapter = functools.cache(TypeAdapter)


@dataclass(frozen=True)
class ForeignKeys:
    """What the keys of another trainer mean for one kind of job.

    A native key is taken as it is. Every other key is first renamed by `aliases`: the longest
    prefix counts, and the rest of the path is kept. `values` renames values of native keys. Then
    the first table with a matching pattern decides, in this order:

        fixed     the setting has one value here: these values are accepted, any other is refused
        shared    the setting is that of another native key: the value has to be equal
        refused   it changes results and is not supported: the text says what to do instead
        ignored   it changes no result: accepted, and named in one note with the reason

    Patterns (`*` matches dots too) are separated by blanks. All tables accept null, "not set".
    `suggested` names the native keys that a misplaced name probably means.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)  # prefix → native prefix
    fixed: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)  # (values, why)
    shared: Mapping[str, str] = field(default_factory=dict)  # patterns → native key
    refused: Mapping[str, str] = field(default_factory=dict)  # patterns → what to do instead
    ignored: Mapping[str, str] = field(default_factory=dict)  # patterns → why it has no effect
    values: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # key=value → native, why
    suggested: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # name → native keys

    def native(self, given: str) -> str:
        """Return `given` with the longest prefix that is an alias replaced."""
        matching = [alias for alias in self.aliases if f"{given}.".startswith(f"{alias}.")]
        alias = max(matching, key=len, default="")
        return self.aliases[alias] + given[len(alias) :] if alias else given

    def find(self, table: str, *names: str) -> Any:
        """Return the entry of a table whose patterns match one of `names`, None if none does."""
        for patterns, entry in getattr(self, table).items():
            if any(fnmatchcase(name, pattern) for pattern in patterns.split() for name in names):
                return entry
        return None


@functools.cache
def foreign_keys(kind: str) -> ForeignKeys:
    """Return what installed extras register of a kind of job, joined.

    The group `hybridengine.keys` holds mappings: kind of job → ForeignKeys.
    """
    registered = [entry.load() for entry in plugins("keys").values()]
    tables = [by_kind[kind] for by_kind in registered if kind in by_kind]
    joined = {
        f.name: {key: value for table in tables for key, value in getattr(table, f.name).items()}
        for f in fields(ForeignKeys)
    }
    return ForeignKeys(**joined)


class GivenSettings:
    """What files and overrides set, by native key, and what is wrong with it.

    schema: the class of the configuration.

    Attributes:
        values: native key → value.
        faults: one line each.
        faulty_keys: native keys that a fault is about; further faults would only repeat it.
        notes: reason → keys without effect.
    """

    def __init__(self, schema: Any, defaults: dict[str, Any]) -> None:
        types = dict(keys_of(schema))
        self._schema, self._known = schema, frozenset(types)
        # Keys whose value is a mapping with keys of any name.
        self._free = frozenset(key for key, hint in types.items() if hint == Options)
        self._paths = read_paths(types)
        self._foreign: ForeignKeys = foreign_keys(schema.kind)
        self._shared: list[tuple[str, str, Any]] = []  # foreign key, native key, value
        self.values, self.faults = defaults, list[str]()
        self.faulty_keys, self.notes = set[str](), dict[str, list[str]]()

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
        for given, value in _leaves(tree, self._free):
            key, value = self._foreign.native(given), _as_text(value)
            key, value = self._in_mapping(key, value)
            if key in self._paths:
                value = find_input(value, self._paths[key], folders)
            if key in self._free and isinstance(value, Mapping | None):
                before = {} if value is None else self.values.get(key) or {}  # null: no entries
                merged = OmegaConf.merge(before, value or {})
                self.values[key] = OmegaConf.to_container(merged)
            elif key not in self._known:
                self._add_foreign(given, key, value, source)
            elif value is None and given != key:  # verl's "not set"
                continue
            elif key in here and here[key][1] not in (None, value) and not last_wins:
                both = f"{here[key][0]} and {given}"
                self.add_fault(f"{key} is given twice in {source}, as {both}; keep one", key)
            else:
                native, reason = self._foreign.values.get(f"{key}={value}", (value, ""))
                if reason:  # the value has another name in verl
                    self.notes.setdefault(reason, []).append(f"{key}={value}")
                here[key] = (given, native)
        self.values |= {key: value for key, (_, value) in here.items()}

    def add_adapter(self) -> None:
        """Add what the initial adapter sets; a setting that contradicts it is a fault.

        Targets may be given in other words; `apply_lora` compares the layers themselves.
        """
        if not isinstance(path := self.values.get(_ADAPTER), str):
            return
        try:
            settings = adapter_settings(path)
        except ConfigError as error:
            self.add_fault(str(error), _ADAPTER)
            return
        for name, value in settings.items():
            own = self.values.get(name) or value
            if own != value and name not in ("model.target_modules", "model.target_parameters"):
                self.add_fault(
                    f"{name} is {own}, but the adapter of {_ADAPTER} {path!r} has {value}; leave "
                    f"{name} out",
                    name,
                )
            self.values[name] = own

    def _in_mapping(self, key: str, value: Any) -> tuple[str, Any]:
        """Return the setting of one entry of a mapping as that of the mapping."""
        for free in self._free:
            if key.startswith(f"{free}."):
                return free, _nested({key.removeprefix(f"{free}."): value})
        return key, value

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
        foreign, where = self._foreign, f"{given} (in {source})"
        if rule := foreign.find("fixed", given, key):
            accepted, reason = rule
            if value is not None and not any(_same(value, a) for a in accepted):
                advice = "" if "set " in reason else "; leave it out"
                self.add_fault(f"{where} is {value!r}, which cannot be set here: {reason}{advice}")
            else:
                self.notes.setdefault(reason, []).append(given)
        elif ours := foreign.find("shared", given, key):
            if value is not None:
                self._shared.append((given, ours, value))
        elif reason := foreign.find("refused", given, key):
            if value is not None:
                self.add_fault(f"{where} is not a key here: {reason}")
        elif reason := foreign.find("ignored", given, key):
            self.notes.setdefault(reason, []).append(given)
        elif group := [k for k in self._known if k.startswith(f"{key}.")]:
            self.add_fault(f"{where} is a group of keys, not {value!r}", *group)
        else:
            close = [*foreign.suggested.get(key, ())] or similar_keys(key, self._names())
            self.add_fault(f"{where} is not a known key; {self._advice(key, close)}", *close)

    def _names(self) -> dict[str, str]:
        """Return all native keys and their other names, each with its native key."""
        others = {}
        for alias, key in self._foreign.aliases.items():
            group, _, leaf = alias.rpartition(".")
            if key in self._known:
                others[f"{self._foreign.native(group)}.{leaf}"] = key
        return others | {key: key for key in sorted(self._known)}

    def _advice(self, key: str, close: list[str]) -> str:
        groups = sorted({k.split(".", 1)[0] for k in self._known if "." in k})
        if close:
            advice = f"did you mean {' or '.join(close)}?"
        elif key.split(".", 1)[0] not in groups:
            advice = f"the groups are {', '.join(groups)}"
        else:
            advice = f"`hybridengine keys {self._schema.kind}` lists them"
        if plugins("keys"):
            return advice
        return (
            f"{advice}; keys of other trainers are read by what is registered in the entry-point "
            "group hybridengine.keys: install hybridengine with its extras/ (`pip install .`)"
        )

    def validated(self) -> Any:
        """Return the configuration, with defaults in place of values of a wrong type or range."""
        while True:
            try:
                return _type_adapter(self._schema).validate_python(_nested(self.values))
            except ValidationError as error:
                for key, message in _messages(error, self.values).items():
                    self.add_fault(f"{key} is {self.values.pop(key)!r}: {message}", key)


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


def _same(value: Any, accepted: Any) -> bool:
    """Whether both are equal and both or neither a bool: 1 is not True."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


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


def adapter_settings(path: str) -> dict[str, Any]:
    """Return what the PEFT adapter in folder `path` sets: rank, scale, layers. Reads no weights.

    Raises ConfigError for a folder without an adapter, and for one that is no plain LoRA.
    """
    folder = Path(path).expanduser()
    file = folder / "adapter_config.json"
    try:
        config = json.loads(file.read_text())
        rank, alpha, targets = (config[name] for name in ("r", "lora_alpha", "target_modules"))
    except FileNotFoundError:
        raise ConfigError(
            f"{_ADAPTER} {located(folder)} has no adapter_config.json; give the folder of a PEFT "
            "adapter"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{_ADAPTER}: {located(file)} is no PEFT LoRA: {error!r}") from None
    others = [f"{name}={config[name]}" for name in _NOT_PLAIN if config.get(name) not in _PLAIN]
    parameters = set(config.get("target_parameters") or ())
    linear = {name for name in parameters if name.endswith(".weight")}  # of a linear layer
    if linear and isinstance(targets, str):
        others.append(f"target_modules={targets} and target_parameters={sorted(linear)}")
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        others.append(f"peft_type={kind}")
    if others:
        raise ConfigError(
            f"{_ADAPTER} {str(folder)!r} has {', '.join(others)}, but only a plain LoRA can be "
            "trained on; merge it into the model (PEFT's merge_and_unload) and leave the key out"
        )
    if not isinstance(targets, str):
        targets = tuple(sorted({*(targets or ()), *(n.removesuffix(".weight") for n in linear)}))
    return {
        "model.lora_rank": rank,
        "model.lora_alpha": float(alpha),
        "model.target_modules": targets,
        "model.target_parameters": tuple(sorted(parameters - linear)),
    }


def similar_keys(key: str, names: Mapping[str, str]) -> list[str]:
    """Return up to three native keys: with the same last part, else with the most similar one.

    names: key → native key. Keys of the same group come first.
    """
    group, _, leaf = key.rpartition(".")
    leaves = {name: name.rpartition(".")[2] for name in names}
    near, most = [name for name in names if leaves[name] == leaf], 3
    for in_group, cutoff in ((True, 0.66), (False, 0.85)) if not near else ():
        scores = {
            name: _similarity(leaf, leaves[name], by_words=in_group)
            for name in names
            if not in_group or name.rpartition(".")[0] == group
        }
        best, most = max(scores.values(), default=0.0), 3 if in_group else 1
        if best >= cutoff:
            near = [name for name, score in scores.items() if score > best - 0.02]
            break
    near = difflib.get_close_matches(key, near, most, cutoff=0)
    return list(dict.fromkeys(names[name] for name in near))


def _similarity(given: str, leaf: str, by_words: bool) -> float:
    """Return how similar the last parts of two keys are, 0 to 1.

    by_words: `given` may also be similar to some words of `leaf`, as bathc_size to val_batch_size.
    """
    whole = difflib.SequenceMatcher(None, given, leaf).ratio()
    if not by_words:
        return whole
    words = leaf.split("_")
    spans = itertools.combinations(range(len(words) + 1), 2)
    parts = {"_".join(words[slice(*span)]) for span in spans} - {leaf}
    near = [difflib.SequenceMatcher(None, given, part).ratio() for part in parts]
    return max([whole, *(ratio - 0.05 for ratio in near if ratio >= 0.85)])
