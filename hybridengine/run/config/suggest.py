"""The keys that a misspelt key may mean."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping


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
