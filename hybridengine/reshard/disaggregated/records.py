"""What trainers and engines tell each other through a store that all of them reach.

Trainer rank 0 alone writes "sync", from which every engine knows what to do, "plan/P" (PlanInputs)
and "trainers/T" (processes). Each engine writes its own keys:

    engine/I                EngineInfo of the process group that is engine number I
    engine/I/back           (incarnation, sync): a dropped engine is back since that sync
    layout/DIGEST           EngineLayout
    S/A/ready/I.N           ranks that wait for attempt A of sync S (I.N: engine, incarnation)
    S/A/done/I.N            ranks that have received everything
    S/state/I.N             Holding of the engine, or why it failed
    S/committed/I.N         ranks whose weight version has moved
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from hybridengine.reshard.delta.find import covers
from hybridengine.reshard.execute.resharder import RankFailedError
from hybridengine.reshard.plan.buckets import Bucket
from hybridengine.runtime.failures import STORE_GONE, one_line, process_state
from hybridengine.sharding.shards import ShardSpec

_PREFIX = "hybridengine/disaggregated"


class Member(NamedTuple):
    """One engine rank; members are ordered by it. rank: in the engine's world."""

    tp_rank: int
    engine: int
    rank: int


@dataclass(frozen=True)
class EngineInfo:
    """What an engine tells as it joins; the lists have one entry per rank.

    index: its number among the engines. incarnation: counts the process groups that were this
    engine. processes: as `this_process`. layouts: digests. device: type. bucket_bytes: its default.
    """

    index: int
    incarnation: int
    processes: Sequence[str]
    tp_ranks: Sequence[int]
    layouts: Sequence[str]
    optional_parameters: frozenset[str]
    config_differences: str
    device: str
    bucket_bytes: int

    @property
    def key(self) -> str:
        return f"{self.index}.{self.incarnation}"

    @property
    def layout_of_tp_rank(self) -> dict[int, str]:
        return dict(sorted(zip(self.tp_ranks, self.layouts, strict=True)))

    def members(self) -> list[Member]:
        return [Member(tp, self.index, rank) for rank, tp in enumerate(self.tp_ranks)]

    def ended_rank(self) -> int | None:
        """Return a rank whose process, on this machine, has ended."""
        return next((r for r, p in enumerate(self.processes) if process_state(p) == "ended"), None)


class Holding(NamedTuple):
    """What an engine has as it comes to a sync, on all its ranks.

    lost: it has no weights. base: their version, if nothing but the syncs has written to them since
    the last one was complete; None: the engine needs all weights.
    """

    lost: bool
    base: int | None


class Generations(NamedTuple):
    """What the trainers have sent: counts of the times when it changed, from 1 on.

    frozen: of the frozen parameters. trained: of those that deltas can update.
    """

    frozen: int
    trained: int


class FactorSpec(NamedTuple):
    """An adapter that is sent in addition to the weights: shapes of its factors, and its scale."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    dtypes: tuple[Any, Any]
    scale: float


@dataclass(frozen=True)
class PlanInputs:
    """All that the plan is made from; every trainer and engine rank computes the plan itself.

    layouts: digest by TP rank. factors: parameter → adapter that is not merged.
    """

    specs: Mapping[str, ShardSpec]
    layouts: Mapping[int, str]
    factors: Mapping[str, FactorSpec]
    bucket_bytes: int
    nodes: Sequence[int]


@dataclass(frozen=True)
class Transfer:
    """One attempt to move the weights to some engines.

    groups: number of the process groups; engines that have them use them again. members: in order
    of their ranks, after the trainers. plan: number of the plan. digest: of the plan. skip_frozen:
    leave out parameters that the engines have. verify: compare checksums. base: version of the
    weights that a delta is made from; None: everything is sent. group_size: of the delta.
    """

    groups: int
    members: Sequence[Member]
    plan: int
    digest: str
    skip_frozen: bool
    verify: bool
    base: int | None = None
    group_size: int = 0

    def moves(self, bucket: Bucket) -> bool:
        """Return whether the bucket is sent as a whole."""
        return self.moves_densely(bucket) and not (self.base is not None and covers(bucket))

    def moves_densely(self, bucket: Bucket) -> bool:
        """Return whether the bucket would be sent without a delta."""
        return not (bucket.frozen and self.skip_frozen)


@dataclass(frozen=True)
class SyncState:
    """The sync in progress, or the last one.

    number: counts the syncs. trainers: number of the sender. invited: engine → incarnation, of the
    engines that take part. is_open: whether it is in progress. failure: why the trainers have given
    it up.
    """

    number: int
    version: int
    trainers: int
    invited: Mapping[int, int]
    is_open: bool = True
    failure: str = ""
    attempt: int = 0
    transfer: Transfer | None = None


class SyncStore:
    """The records of all syncs, in a `torch.distributed` store."""

    def __init__(self, store: dist.Store) -> None:
        # Any: torch's stubs know neither values of bytes nor `clone`.
        self._base: Any = store
        self._store: Any = dist.PrefixStore(_PREFIX, store)
        self._has_sync = False

    def set(self, key: str, value: object) -> None:
        """Write a picklable value."""
        with _store_errors():
            self._store.set(key, zlib.compress(pickle.dumps(value), 1))

    def get(self, key: str) -> Any:
        """Return the value under `key`, None if there is none."""
        return self._value(key) if self.has(key) else None

    def get_sync(self) -> Any:
        """Return the SyncState, None if there is none. One request: it is never deleted."""
        self._has_sync = self._has_sync or self.has("sync")
        return self._value("sync") if self._has_sync else None

    def _value(self, key: str) -> Any:
        with _store_errors():
            return pickle.loads(zlib.decompress(self._read(key)))

    def has(self, key: str) -> bool:
        with _store_errors():
            return self._store.check([key])

    def _read(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, 0 at first, and return it."""
        with _store_errors():
            return self._store.add(key, amount)

    def count(self, key: str) -> int:
        """Return a counter."""
        with _store_errors():
            return int(self._read(key)) if self.has(key) else 0

    def delete(self, keys: Sequence[str]) -> None:
        """Delete what there is of `keys`."""
        with _store_errors():
            for key in keys:
                self._store.delete_key(key)

    def for_group(self, number: int, name: str) -> dist.Store:
        """Return where the members of a process group meet."""
        return dist.PrefixStore(f"group/{number}/{name}", self._store)

    def own_connection(self) -> SyncStore:
        """Return the same records over a connection for another thread."""
        with _store_errors():
            return SyncStore(self._base.clone())


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, RankFailedError):
            raise
        raise RankFailedError(f"{STORE_GONE} ({one_line(error)})") from error
