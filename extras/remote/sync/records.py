"""What trainers and engines tell each other through a store that all of them reach.

Trainer rank 0 alone writes "sync", from which every engine knows what to do, "plan/P" (PlanInputs)
and "trainers/T" (processes). Each engine writes its own keys:

    engine/I                EngineInfo of the process group that is engine number I
    engine/I/back           (incarnation, sync): a dropped engine is back since that sync
    layout/DIGEST           EngineLayout
    S/A/ready/I.N/R         rank R waits for attempt A of sync S (I.N: engine, incarnation)
    S/A/moving/I.N/R        rank R has received everything
    S/A/committing/I.N/R    rank R has finished its update
    S/state/I.N             Holding of the engine, or why it failed
    S/committed/I.N/R       the weight version of rank R has moved
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybridengine.run.activity import process_state, stopped_ranks
from hybridengine.run.failures import STORE_GONE, one_line
from hybridengine.run.messages import MessageError, SignedStore
from hybridengine.sync.adapter import Adapter, adapter_factors
from hybridengine.sync.checks import check_fit
from hybridengine.sync.layout import EngineLayout, TensorSpec
from hybridengine.sync.mover import Order
from hybridengine.sync.planner import ReshardPlan, build_plan
from hybridengine.sync.shards import Holders, ShardSpec
from hybridengine.sync.weight_target import RankFailedError

_PREFIX = "hybridengine/disaggregated"


class Member(NamedTuple):
    """One engine rank, `rank` of its engine's world; members are ordered by these fields."""

    tp_rank: int
    engine: int
    rank: int


@dataclass(frozen=True)
class EngineInfo:
    """What an engine reports when it joins; the lists have one entry per rank.

    index: the engine's number among the engines.
    incarnation: how many process groups have been this engine, this one included.
    processes: the processes, as `this_process` names them.
    layouts: the digests of the engine layouts.
    model_config: see `WeightTarget`.
    device: the type of device that holds the weights.
    devices: the devices, as `device_id` names them.
    bucket_bytes: the engine's default size of a bucket.
    """

    index: int
    incarnation: int
    processes: Sequence[str]
    tp_ranks: Sequence[int]
    layouts: Sequence[str]
    optional_parameters: frozenset[str]
    model_config: dict[str, Any]
    device: str
    devices: Sequence[str]
    bucket_bytes: int

    @property
    def key(self) -> str:
        return f"{self.index}.{self.incarnation}"

    @property
    def layout_of_tp_rank(self) -> dict[int, str]:
        return dict(sorted(zip(self.tp_ranks, self.layouts, strict=True)))

    def members(self) -> list[Member]:
        return [Member(tp, self.index, rank) for rank, tp in enumerate(self.tp_ranks)]

    def ended_ranks(self) -> Iterator[int]:
        """Yield the ranks whose processes, on this machine, have ended."""
        return (r for r, p in enumerate(self.processes) if process_state(p) == "ended")

    def stopped_ranks(self) -> str:
        """Return which ranks' processes, on this machine, are stopped; "" for none."""
        return stopped_ranks(self.processes)


class Holding(NamedTuple):
    """The weights that all ranks of an engine hold when it comes to a sync.

    lost: its weights are missing, or something else has written to them since the last sync was
      complete: the engine needs all of them.
    base: the version of its weights; None if the engine needs all trained weights.
    """

    lost: bool
    base: int | None


class Generations(NamedTuple):
    """What the trainers have sent: counts of the times when it changed, from 1 on.

    frozen: the count for the frozen parameters.
    trained: the count for the parameters that deltas can update.
    """

    frozen: int
    trained: int


@dataclass(frozen=True)
class PlanInputs:
    """All that the plan is made from; every trainer and engine rank computes the plan itself.

    shards: parameter → its placement, without holders.
    holders, holders_of: the holders, once for all parameters that have the same ones, and parameter
      → their index.
    layouts: the digest of the engine layout, by TP rank.
    factors, scales: of the adapters that are not merged, named as `adapter_factors` names them, and
      by parameter.
    """

    shards: Mapping[str, ShardSpec]
    holders: Sequence[Holders]
    holders_of: Mapping[str, int]
    layouts: Mapping[int, str]
    factors: Mapping[str, TensorSpec]
    scales: Mapping[str, float]
    bucket_bytes: int
    nodes: Sequence[int]

    @classmethod
    def of(
        cls,
        specs: Mapping[str, ShardSpec],
        adapters: Mapping[str, Adapter],
        layouts: Mapping[int, str],
        bucket_bytes: int,
        nodes: Sequence[int],
    ) -> PlanInputs:
        """Return the inputs for parameters with `specs`, and adapters that are not merged."""
        distinct = {id(s.holders): s.holders for s in specs.values()}  # each has all ranks
        index = {i: k for k, i in enumerate(distinct)}
        shards = {name: replace(s, holders=()) for name, s in specs.items()}
        holders_of = {name: index[id(s.holders)] for name, s in specs.items()}
        factors = {name: TensorSpec.of(t) for name, t in adapter_factors(adapters).items()}
        scales = {name: adapter.scale for name, adapter in adapters.items()}
        holders = list(distinct.values())
        return cls(shards, holders, holders_of, layouts, factors, scales, bucket_bytes, nodes)

    @cached_property
    def specs(self) -> dict[str, ShardSpec]:
        """Return parameter → its placement."""
        return {
            name: replace(spec, holders=self.holders[self.holders_of[name]])
            for name, spec in self.shards.items()
        }


@dataclass(frozen=True)
class Transfer:
    """One attempt to move the weights to some engines.

    groups: number of the set of connections; engines that already have it use it again.
    members: the engine ranks in the order of their ranks, which follow the trainers'.
    feeders: the feeders of each member (see `MemoryLink`); None: process groups are used.
    plan: the number of the plan.
    digest: the digest of the plan.
    order: which part of the weights moves.
    delta: (version of the weights that a delta is made from, elements in a group of it); None:
      everything is sent.
    """

    groups: int
    members: Sequence[Member]
    feeders: Sequence[Sequence[int]] | None
    plan: int
    digest: str
    order: Order
    delta: tuple[int, int] | None


@dataclass(frozen=True)
class SyncState:
    """The sync in progress, or the last one.

    number: the number of this sync, counted from 1.
    trainers: the number of the sender.
    invited: engine → incarnation, of the engines that take part.
    is_open: whether the sync is in progress.
    failure: the reason why the trainers have given it up; "" if they have not.
    begun: the engines to which a transfer has begun, whether or not they still take part.
    """

    number: int
    version: int
    trainers: int
    invited: Mapping[int, int]
    is_open: bool = True
    failure: str = ""
    attempt: int = 0
    transfer: Transfer | None = None
    begun: frozenset[int] = frozenset()


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, RankFailedError | MessageError):
            raise
        raise RankFailedError(f"{STORE_GONE} ({one_line(error)})") from error


class SyncStore(SignedStore):
    """The records of all syncs, in a `torch.distributed` store, signed by HYBRIDENGINE_SECRET.

    All methods raise RankFailedError if the store is gone, and those that read MessageError for a
    record that no process of the run has written.
    """

    set = _store_errors()(SignedStore.set)
    read = _store_errors()(SignedStore.read)
    has = _store_errors()(SignedStore.has)
    claim = _store_errors()(SignedStore.claim)
    delete = _store_errors()(SignedStore.delete)

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store, _PREFIX)
        self._has_sync = False

    def get_sync(self) -> SyncState | None:
        """Return the state of the sync, None if there is none. One request: it is never deleted."""
        self._has_sync = self._has_sync or self.has("sync")
        return self.read("sync", SyncState) if self._has_sync else None

    def next_number(self, key: str) -> int:
        """Count from 1. One process at a time counts under a key."""
        number: int = (self.get(key, int) or 0) + 1
        self.set(key, number)
        return number

    def world(self) -> str:
        """Return an identifier that all trainers and engines of the store have in common."""
        return str(self.claim("world", secrets.token_hex(8), str))

    def mark(self, key: str, rank: int) -> None:
        """Record that a rank of an engine has reached `key`."""
        self.set(f"{key}/{rank}", True)

    def is_marked(self, key: str, rank: int) -> bool:
        return bool(self.get(f"{key}/{rank}", bool))

    def all_marked(self, key: str, num_ranks: int) -> bool:
        return all(self.is_marked(key, rank) for rank in range(num_ranks))

    @_store_errors()
    def own_connection(self) -> SyncStore:
        """Return the same records over a connection for another thread."""
        return SyncStore(self.base.clone())


def make_plan(
    inputs: PlanInputs,
    store: SyncStore,
    optional_parameters: Set[str],
    config_differences: Mapping[str, str],
) -> ReshardPlan:
    """Plan for the trainers, then one receiving rank for each tensor-parallel rank.

    A trainer's engine layout is empty. The receiving rank is in no trainer's node. The arguments
    except `inputs` and `store` are those of `WeightTarget`. Raises LayoutError as `build_plan`.
    """
    layouts = [
        store.get(f"layout/{digest}", EngineLayout).with_full_tensors(inputs.factors)
        for _, digest in sorted(inputs.layouts.items())
    ]
    nodes = [*inputs.nodes, *[max(inputs.nodes) + 1] * len(layouts)]
    layouts = [EngineLayout({})] * len(inputs.nodes) + layouts
    check_fit(inputs.specs, layouts, optional_parameters, config_differences)
    return build_plan(inputs.specs, layouts, inputs.bucket_bytes, nodes)


def device_id(device: torch.device) -> str:
    """Return an identifier of a device, equal in all processes that use it."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
