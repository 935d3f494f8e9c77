"""Which ranks hold each shard, over all device meshes of the ranks.

A rank knows only its own mesh. Where FSDP2 runs over tensor parallelism, a weight that is not
tensor-parallel (a norm) is sharded on a mesh of the ranks of equal TP rank, of which there are as
many as TP ranks: each of them holds the full weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridengine.run.all_ranks import all_gather_values, broadcast_value
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.shards import Holders, ShardSpec

_View = tuple[list[Holders], dict[str, int]]  # what a rank knows; parameter → index in the list


def unite_holders(specs: Mapping[str, ShardSpec]) -> dict[str, ShardSpec]:
    """Return `specs` with the holders that any rank knows of; collective.

    Raises LayoutError, on every rank, if ranks divide a parameter differently.
    """
    distinct: dict[Holders, int] = {}
    by_id = {id(s.holders): s.holders for s in specs.values()}  # compare each object once
    index = {i: distinct.setdefault(holders, len(distinct)) for i, holders in by_id.items()}
    own: _View = list(distinct), {name: index[id(s.holders)] for name, s in specs.items()}
    digests = all_gather_values(hashlib.sha256(repr(own).encode()).hexdigest(), str)
    if len(set(digests)) == 1:
        return dict(specs)
    firsts = sorted({digests.index(digest) for digest in digests})
    views = [broadcast_value(own, _View, first) for first in firsts]
    if any(numbers.keys() != specs.keys() for _, numbers in views):
        return dict(specs)  # ranks train different models: their plans' digests will tell
    united: dict[tuple[int, ...], Holders] = {}
    result = {}
    for name, spec in specs.items():
        key = tuple(numbers[name] for _, numbers in views)
        if key not in united:
            parts = [known[i] for (known, _), i in zip(views, key, strict=True)]
            united[key] = _union(name, parts)
        result[name] = replace(spec, holders=united[key])
    return result


def _union(name: str, known: Sequence[Holders]) -> Holders:
    """Return all holders of each shard, ascending."""
    if len({len(holders) for holders in known}) == 1:
        union = tuple(tuple(sorted(set().union(*h))) for h in zip(*known, strict=True))
        ranks = [rank for shard in union for rank in shard]
        if len(set(ranks)) == len(ranks) and len({len(shard) for shard in union}) == 1:
            return union
    raise LayoutError(
        f"parameter {name!r} is sharded differently on different ranks: "
        f"{' and '.join(str(h) for h in known[:2])} are the holders of its shards. Shard it on "
        "meshes of equal shape on all ranks."
    )
