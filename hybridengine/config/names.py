"""Given keys, verl's among them → native keys, with every refusal and note collected."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

from omegaconf import OmegaConf

from hybridengine.config.aliases import Names

__all__ = ["Settings"]


@dataclass
class Settings:
    """What files and overrides set, by native key, and what is wrong with it.

    known: native keys; free: those of them that are mappings with keys of any name.
    values: native key → value. faults: one line each. doubtful: native keys that a fault is about,
    so that a check built on them would only repeat it. notes: reason → keys without effect.
    """

    kind: str
    names: Names
    known: frozenset[str]
    free: frozenset[str]
    values: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    notes: dict[str, list[str]] = field(default_factory=dict)
    _shared: list[tuple[str, str, Any]] = field(default_factory=list)

    def take(self, tree: Mapping[str, Any], source: str) -> None:
        """Add the settings of one source, which win over those before."""
        here: dict[str, tuple[str, Any]] = {}
        for given, value in _leaves(tree, self.free):
            key = self._native(given)
            if key in self.free and isinstance(value, Mapping):
                merged = OmegaConf.merge(self.values.get(key) or {}, value)
                self.values[key] = OmegaConf.to_container(merged)
            elif key not in self.known:
                self._foreign(given, key, value, source)
            elif value is None and given != key:  # verl's "not set"
                continue
            elif key in here and here[key][1] not in (None, value):
                self._fault(
                    f"{key} is given twice in {source}, as {here[key][0]} and {given}; keep one",
                    key,
                )
            else:
                here[key] = (given, value)
        self.values |= {key: value for key, (_, value) in here.items()}

    def check_shared(self, config: Any) -> Iterator[str]:
        """Faults of keys that are one setting with another key, once that one's value is known."""
        for given, ours, value in self._shared:
            own = reduce(getattr, ours.split("."), config)
            equal = (own, list(own)) if isinstance(own, tuple) else (own,)
            if own != "auto" and value not in equal:
                yield f"{given} is {value!r}, but it is one setting with {ours}, which is {own!r}"

    def _native(self, given: str) -> str:
        for alias in sorted(self.names.aliases, key=len, reverse=True):
            if f"{given}.".startswith(f"{alias}."):
                return self.names.aliases[alias] + given[len(alias) :]
        return given

    def _foreign(self, given: str, key: str, value: Any, source: str) -> None:
        """Sort a key that is not ours into fixed, shared, refused, ignored or unknown."""
        names, where = self.names, f"{given} (in {source})"
        if rule := _match(names.fixed, given, key):
            accepted, reason = rule
            if value is not None and not any(_same(value, a) for a in accepted):
                self._fault(f"{where} is {value!r}, which cannot be set here: {reason}")
            else:
                self._note(reason, given)
        elif ours := _match(names.shared, given, key):
            if value is not None:
                self._shared.append((given, ours, value))
        elif reason := _match(names.refused, given, key):
            if value is not None:
                self._fault(f"{where} is not a key here: {reason}")
        elif reason := _match(names.ignored, given, key):
            self._note(reason, given)
        elif any(k.startswith(f"{key}.") for k in self.known):
            self._fault(f"{where} is a group of keys, not {value!r}", *self._in_group(key))
        else:
            close = _similar(key, self.known)
            self._fault(f"{where} is not a known key; {self._advice(key, close)}", *close)

    def _advice(self, key: str, close: list[str]) -> str:
        if close:
            return f"did you mean {' or '.join(close)}?"
        groups = sorted({k.split(".", 1)[0] for k in self.known if "." in k})
        if key.split(".", 1)[0] not in groups:
            return f"the groups are {', '.join(groups)}"
        return f"`hybridengine keys {self.kind}` lists them"

    def _in_group(self, key: str) -> list[str]:
        return [k for k in self.known if k.startswith(f"{key}.")]

    def _fault(self, text: str, *about: str) -> None:
        self.faults.append(text)
        self.doubtful.update(about)

    def _note(self, reason: str, given: str) -> None:
        self.notes.setdefault(reason, []).append(given)


def _leaves(
    tree: Mapping[str, Any], free: frozenset[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if name in ("_target_", "hydra", "defaults"):  # Hydra's own
            continue
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not any(f".{key}".endswith(f".{f}") for f in free):
            yield from _leaves(value, free, f"{key}.")
        else:
            yield key, value


def _match(table: Mapping[str, Any], *keys: str) -> Any:
    for patterns, entry in table.items():
        if any(fnmatchcase(key, pattern) for pattern in patterns.split() for key in keys):
            return entry
    return None


def _same(value: Any, accepted: Any) -> bool:
    """Equal and both or neither a truth value: 1 is not True."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


def _similar(key: str, known: frozenset[str]) -> list[str]:
    """At most three keys with the same last part, else the one that is nearly the same."""
    parent, _, leaf = key.rpartition(".")

    def likeness(k: str) -> float:
        return difflib.SequenceMatcher(None, key, k).ratio()

    same = [k for k in known if k.rpartition(".")[2] == leaf]
    if same:
        return sorted(same, key=lambda k: (-likeness(k), k))[:3]

    def nearness(
        k: str,
    ) -> float:  # a slip of the pen in the last part, in its own group or another
        group, _, last = k.rpartition(".")
        ratio = difflib.SequenceMatcher(None, leaf, last).ratio()
        return ratio if ratio >= (0.66 if group == parent else 0.85) else 0.0

    best = max(sorted(known), key=lambda k: (nearness(k), likeness(k)))
    return [best] if nearness(best) else []
