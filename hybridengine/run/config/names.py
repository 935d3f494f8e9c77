"""Names of keys that are not ours: those of other trainers, and misspelt ones."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from hybridengine.run.plugins import plugins

__all__ = ["ForeignKeys", "foreign_keys", "similar_keys"]


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


@cache
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


def similar_keys(key: str, names: Mapping[str, str]) -> list[str]:
    """Return up to three native keys: with the same last part, else with the most similar one.

    names: key → native key. Keys of the same group come first.
    """
    group, _, leaf = key.rpartition(".")
    by_leaf: dict[str, list[str]] = {}
    for name in names:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    if leaf in by_leaf:
        near = difflib.get_close_matches(key, by_leaf[leaf], cutoff=0)
        return list(dict.fromkeys(names[name] for name in near))
    for in_group, cutoff in ((True, 0.66), (False, 0.85)):
        scores = {
            name: _similarity(leaf, name.rpartition(".")[2], by_words=in_group)
            for name in names
            if not in_group or name.rpartition(".")[0] == group
        }
        best = max(scores.values(), default=0.0)
        if best >= cutoff:
            near = [name for name, score in scores.items() if score > best - 0.02]
            near = difflib.get_close_matches(key, near, 3 if in_group else 1, cutoff=0)
            return list(dict.fromkeys(names[name] for name in near))
    return []


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
