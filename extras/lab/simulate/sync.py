"""Time and bytes of the weight sync: a closed form for the search, the planner for what is shown.

The closed form is HybridFlow's volume (arXiv 2409.19256, table 2): a rank of the engine needs
1/t of the weights and, where it trains too, holds 1/F of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PretrainedConfig

from hybridengine.lab.advisor import advise
from hybridengine.lab.simulate.cluster import Cluster
from hybridengine.lab.simulate.model import Layout, ModelShape, Workload
from hybridengine.sync.layout import EngineLayout
from hybridengine.sync.planner import Planner, ReshardPlan
from hybridengine.sync.shards import ShardSpec

_BUCKET_LATENCY_S = 100e-6  # of an all-to-all and its launches, as in the advisor


@dataclass(frozen=True)
class Sync:
    """The cost of a weight sync on the busiest rank.

    seconds: the time of the sync.
    received, sent: bytes.
    lower_bound: the fewest bytes that the rank has to receive.
    source: "formula" or "planner".
    """

    seconds: float
    received: float
    sent: float
    lower_bound: float
    source: str


def estimate(model: ModelShape, work: Workload, layout: Layout, cluster: Cluster) -> Sync:
    """Return the closed form, sent evenly by all trainer ranks."""
    weights = float(work.engine_itemsize * model.num_parameters)
    slice_bytes = weights / layout.tp_size
    if layout.is_split:
        sent = weights / layout.actor_ranks  # once over the network; replicas of an engine pass on
        return _split_sync(slice_bytes, sent, slice_bytes, layout, cluster, 0)
    # Replicas inside a node: shards do not lie in the slices of their ranks.
    aligned = layout.replicas == 1 or layout.fsdp_size % cluster.gpus_per_node == 0
    held = weights / max(layout.fsdp_size, layout.tp_size) if aligned else 0.0
    received = slice_bytes - held
    in_node = min(layout.fsdp_size, cluster.gpus_per_node) / layout.fsdp_size
    rate = cluster.efficiency.network
    seconds = received * in_node / (cluster.device.intra_rate * rate)
    seconds += received * (1 - in_node) / (cluster.device.inter_rate * rate)
    cast = cluster.stream((4 + work.engine_itemsize) * model.num_parameters / layout.fsdp_size)
    return Sync(seconds + cast, received, received, received, "formula")


def _split_sync(
    received: float, sent: float, bound: float, layout: Layout, cluster: Cluster, buckets: int
) -> Sync:
    """Every destination byte crosses once; engines then gather it among each other."""
    rate = cluster.device.inter_rate * cluster.efficiency.network
    engines = layout.num_engines
    first = max(sent, received / engines) / rate
    seconds = first + received * (engines - 1) / engines / rate + buckets * _BUCKET_LATENCY_S
    return Sync(seconds, received, sent, bound, "planner" if buckets else "formula")


@dataclass
class SyncPlanner:
    """Plan syncs with the reshard planner, from vLLM's own loader.

    config: the model's. Layouts are recorded once per TP size.
    """

    config: PretrainedConfig
    trust_remote_code: bool
    work: Workload
    cluster: Cluster
    _recorded: dict[int, tuple[Mapping[str, tuple[int, ...]], list[EngineLayout]]] = field(
        default_factory=dict
    )

    def plan(self, layout: Layout) -> Sync:
        """Plan one layout. Raises what vLLM and the planner raise for unsupported models."""
        shapes, engine = self._layouts(layout.tp_size)
        scale = self.work.engine_itemsize / torch.bfloat16.itemsize  # recorded in bfloat16
        if layout.is_split:
            plan = split_plan(shapes, engine, layout.actor_ranks, layout.fsdp_size)
            trainers = range(layout.actor_ranks)
            sent = scale * max(plan.bytes_sent[rank] for rank in trainers)
            received, bound = scale * max(plan.bytes_received), scale * max(plan.lower_bound)
            return _split_sync(received, sent, bound, layout, self.cluster, len(plan.buckets))
        device, share = self.cluster.device, self.cluster.efficiency.network
        advice = advise(
            shapes,
            engine,
            layout.actor_ranks,
            nodes=max(1, layout.actor_ranks // self.cluster.gpus_per_node),
            fsdp_size=layout.fsdp_size,
            intra_gb_per_s=device.intra_rate * share / scale / 1e9,
            inter_gb_per_s=device.inter_rate * share / scale / 1e9,
        )
        # Shared weights need shards of dim 0 (`SharedParameters`).
        best = next(
            option
            for option in advice.options
            if not (layout.share_engine_weights and (option.row_dim or option.expert_dim))
        )
        cast = self.cluster.stream(
            (4 + self.work.engine_itemsize) * advice.num_parameters / layout.fsdp_size
        )
        return Sync(
            best.seconds + cast,
            scale * best.received_bytes,
            scale * max(best.plan.bytes_sent),
            scale * best.lower_bound_bytes,
            "planner",
        )

    def _layouts(self, tp_size: int) -> tuple[Mapping[str, tuple[int, ...]], list[EngineLayout]]:
        from hybridengine.lab.layouts import record_engine_layouts

        if tp_size not in self._recorded:
            with tempfile.TemporaryDirectory() as folder:
                self.config.save_pretrained(Path(folder))
                self._recorded[tp_size] = record_engine_layouts(
                    folder, tp_size, self.trust_remote_code
                )
        return self._recorded[tp_size]


def split_plan(
    shapes: Mapping[str, tuple[int, ...]],
    engine: Sequence[EngineLayout],
    trainer_ranks: int,
    fsdp_size: int,
) -> ReshardPlan:
    """Plan from trainer ranks to the TP ranks of one engine, which hold nothing.

    The ranks of the plan are the trainer's, then the engine's.
    """
    nothing = EngineLayout({})
    ranks = range(trainer_ranks)
    holders = tuple(tuple(ranks[shard::fsdp_size]) for shard in range(fsdp_size))
    sources = {
        name: ShardSpec.along(shape or (1,), torch.float32, 0, holders)
        for name, shape in shapes.items()
    }
    layouts = [nothing] * trainer_ranks + list(engine)
    nodes = [0] * trainer_ranks + [1] * len(engine)
    return Planner(layouts, nodes=nodes).plan(sources)
