"""The advisor: bytes and time of a weight sync, planned from shapes and engine layouts alone.

A plan is made for each way to group the ranks and to shard row-parallel weights and fused experts.
Baselines for the same case, with M the size of all trained parameters: HybridFlow's formula (arXiv
2409.19256, table 2) M (1/t - 1/N) in the engine's dtype, and verl's gather of all parameters
M (1 - 1/N) in the float32 of the master weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from hybridengine.lab.layouts import TrainerLayout
from hybridengine.run.config import JobConfig, RLConfig
from hybridengine.sync.layout import EngineLayout
from hybridengine.sync.planner import Planner, ReshardPlan
from hybridengine.sync.shards import dim1_parameters, tp_groups
from hybridengine.sync.source_class import SourceClass
from hybridengine.train.choices import Choices
from hybridengine.train.performance import num_parameters

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2.0**20


@dataclass(frozen=True)
class Option:
    """One way to group TP ranks and to shard parameters, with the plan of its sync.

    grouping: TP groups are "strided" over all ranks ({j, j+N/t, …}), "strided in nodes", or
      "contiguous" ({jt, jt+1, …}).
    tp_in_node: whether every TP group is inside a node.
    row_dim, expert_dim: dimension on which row-parallel weights and fused experts are sharded.
    seconds: estimated time of a sync, see `advise`.
    """

    grouping: str
    tp_in_node: bool
    row_dim: int
    expert_dim: int
    plan: ReshardPlan
    seconds: float

    @property
    def received_bytes(self) -> int:
        return max(self.plan.bytes_received)

    @property
    def lower_bound_bytes(self) -> int:
        return max(self.plan.lower_bound)

    @property
    def inter_bytes(self) -> int:
        """Return the bytes that the busiest rank receives from other nodes."""
        return max(self.plan.bytes_crossing)


@dataclass(frozen=True)
class Advice:
    """All options, best first, and baselines for the same case; bytes are per rank.

    An option with TP groups inside nodes always precedes one whose groups cross nodes: generation
    reduces over a group twice per layer and token, a sync runs once per step.

    hybridflow_bytes: HybridFlow's formula; None for engines with DP ranks, which it does not cover.
    fallback: parameter → the reason why it is gathered in full.
    """

    num_parameters: int
    world_size: int
    tp_size: int
    dp_size: int
    nodes: int
    options: list[Option]
    hybridflow_bytes: int | None
    verl_bytes: int
    fallback: dict[str, str]


def advise(
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Sequence[EngineLayout],
    world_size: int,
    *,
    nodes: int = 1,
    dp_size: int = 1,
    fsdp_size: int | None = None,
    train_tp: int = 1,
    train_ep: int = 1,
    intra_gb_per_s: float = 450.0,
    inter_gb_per_s: float = 50.0,
    latency_us: float = 100.0,
    bucket_bytes: int = 64 << 20,
) -> Advice:
    """Plan every option for `world_size` ranks.

    shapes: trained parameter → its global shape.
    layouts: those of all ranks of an engine, in vLLM's order: TP rank fastest, then DP rank.
    dp_size: the number of DP ranks of an engine.
    fsdp_size: ranks per HSDP replica, contiguous; None for all ranks.
    train_tp: the trainer runs FSDP2 over tensor parallelism of this size, which divides the weights
      on the dimension that the engine slices.
    train_ep: FSDP2 over expert parallelism, which divides fused experts.
    intra_gb_per_s, inter_gb_per_s: what one rank can send, and at the same time receive, inside a
      node and across nodes, in 10^9 bytes per second.
    latency_us: the latency of one all-to-all, in addition to the time of its bytes.

    The estimated time of a sync is the sum over buckets of the bytes that the busiest rank sends or
    receives inside its node and across nodes, at these speeds, and the latency.
    """
    engine_size, fsdp_size = len(layouts), fsdp_size or world_size
    tp_size = engine_size // dp_size
    sizes = {"nodes": nodes, "fsdp_size": fsdp_size, "tp": tp_size, "tp times dp": engine_size}
    for name, size in sizes.items():
        if size < 1 or world_size % size:
            raise ValueError(f"{name}: got {size}, expected a divisor of the {world_size} ranks")
    node = [rank * nodes // world_size for rank in range(world_size)]
    sliced = layouts[0].sliced_dims(shapes)
    trainer = TrainerLayout.of(shapes, sliced, world_size, fsdp_size, train_tp, train_ep)
    shardings = _shardings(shapes, sliced, engine_size, fsdp_size)
    options = []
    for grouping, groups in _groupings(world_size, engine_size, nodes).items():
        tp_groups_of = [g[i : i + tp_size] for g in groups for i in range(0, engine_size, tp_size)]
        in_node = all(len({node[rank] for rank in group}) == 1 for group in tp_groups_of)
        engine_rank = {rank: i for group in groups for i, rank in enumerate(group)}
        layout_of_rank = [layouts[engine_rank[rank]] for rank in range(world_size)]
        planner = Planner(layout_of_rank, bucket_bytes, node)
        for dims, on_dim1 in shardings.items():
            plan = planner.plan(trainer.sources(shapes, on_dim1))
            seconds = sum(
                bucket.intra_bytes / (intra_gb_per_s * 1e9)
                + bucket.inter_bytes / (inter_gb_per_s * 1e9)
                + latency_us * 1e-6
                for bucket in plan.buckets
                if bucket.intra_bytes or bucket.inter_bytes
            )
            options.append(Option(grouping, in_node, *dims, plan, seconds))
    options.sort(key=lambda o: (not o.tp_in_node, o.seconds, o.received_bytes))
    numel = sum(math.prod(shape) for shape in shapes.values())
    engine_bytes = numel * torch.bfloat16.itemsize
    return Advice(
        num_parameters=numel,
        world_size=world_size,
        tp_size=tp_size,
        dp_size=dp_size,
        nodes=nodes,
        options=options,
        hybridflow_bytes=(
            round(engine_bytes * (1 / tp_size - 1 / world_size)) if dp_size == 1 else None
        ),
        verl_bytes=round(numel * torch.float32.itemsize * (1 - 1 / world_size)),
        fallback={n: why for layout in layouts for n, why in layout.fallback.items()},
    )


def _groupings(world_size: int, size: int, nodes: int) -> dict[str, list[list[int]]]:
    """Return the ranks of each engine by the name of the grouping; equal ones once, by the first.

    size: the number of ranks of an engine.
    """
    ranks = list(range(world_size))
    groupings = {
        "strided": tp_groups(world_size, size),
        "strided in nodes": tp_groups(world_size, size, world_size // nodes),
        "contiguous": [ranks[first : first + size] for first in ranks[::size]],
    }
    first = {repr(groups): name for name, groups in reversed(groupings.items())}
    return {name: groups for name, groups in groupings.items() if first[repr(groups)] == name}


def _shardings(
    shapes: Mapping[str, tuple[int, ...]],
    sliced: Mapping[str, int],
    engine_size: int,
    num_shards: int,
) -> dict[tuple[int, int], set[str]]:
    """Return (row_dim, expert_dim) → parameters sharded on dim 1, without repetitions."""
    shardings: dict[tuple[int, int], set[str]] = {}
    for row_dim, expert_dim in ((0, 0), (1, 0), (1, 1)) if engine_size > 1 else ((0, 0), (0, 1)):
        on_dim1 = dim1_parameters(
            shapes, sliced, num_shards, row_parallel=row_dim == 1, experts=expert_dim == 1
        )
        if on_dim1 not in shardings.values():
            shardings[row_dim, expert_dim] = on_dim1
    return shardings


def sync_volume(config: JobConfig, choices: Choices) -> str | None:
    """Describe how much a weight sync will move, from the configuration alone; None of SFT."""
    if not isinstance(config, RLConfig):
        return None
    from hybridengine.lab.layouts import record_engine_layouts

    per_weight = getattr(torch, config.rollout.dtype).itemsize
    if config.overlaps:
        size = num_parameters(config) * per_weight / config.rollout.tensor_model_parallel_size
        return f"{size / 2**20:.1f} MiB received per engine rank and step"
    if choices.engine == "hf":
        received = lower = num_parameters(config) * per_weight * (1 - 1 / config.world_size)
    else:
        shapes, layouts = record_engine_layouts(
            config.model.path,
            config.rollout.tensor_model_parallel_size,
            config.model.trust_remote_code,
        )
        nodes, fsdp_size = config.trainer.nnodes, config.num_shards()
        advice = advise(shapes, layouts, config.world_size, nodes=nodes, fsdp_size=fsdp_size)
        best = advice.options[0]
        scale = per_weight / torch.bfloat16.itemsize  # advise plans bfloat16
        received, lower = best.received_bytes * scale, best.lower_bound_bytes * scale
    return (
        f"{received / 2**20:.1f} MiB received per rank and step (lower bound {lower / 2**20:.1f})"
    )


def print_advice(advice: Advice, console: Console) -> None:
    """Print the options, best first, the baselines and a recommendation."""
    n, t, d = advice.world_size, advice.tp_size, advice.dp_size
    engine = f"DP {d}, TP {t}" if d > 1 else f"TP {t}"
    console.print(
        f"[bold]{advice.num_parameters / 1e9:.2f}B parameters, {n} ranks on {advice.nodes} "
        f"node{'s' if advice.nodes > 1 else ''}, {n // (t * d)} engines of {engine}; per rank and "
        "sync:"
    )
    shown = advice.options[:6]  # as many as fit a terminal
    rows = [_row(option) for option in shown]
    names = [_name(option).replace(", ", ",\n") for option in shown]
    hybridflow = ""
    if advice.hybridflow_bytes is not None:
        hybridflow = f"{_size(advice.hybridflow_bytes)} received (HybridFlow's formula), "
    # One option per column, at most 80 characters in all.
    table = Table("TP groups,\nrow-parallel", *names, box=None, pad_edge=False)
    for key in rows[0]:
        table.add_row(f"[bold]{key}", *(row[key] for row in rows))
    console.print(table)
    console.print(
        f"Baselines: {hybridflow}{_size(advice.verl_bytes)} received (verl: gathers all parameters "
        "in float32)."
    )
    best, others = advice.options[0], advice.options[1:]
    reasons = f"{_reason(best, others)}{_uneven_sending(best)}"
    console.print(f"Recommended: [bold]{_name(best)}[/bold]. {reasons}")
    for name, why in advice.fallback.items():
        console.print(f"gathered in full: {name} ({why})", markup=False)


def _row(option: Option) -> dict[str, str]:
    plan = option.plan
    return {
        "TP traffic": "inside nodes" if option.tp_in_node else "across nodes",
        "received": _size(option.received_bytes),
        "sent": _size(max(plan.bytes_sent)),
        "lower bound": _size(option.lower_bound_bytes),
        "across nodes": f"{option.inter_bytes / max(1, option.received_bytes):.0%}",
        "staging": f"2 × {_size(plan.staging_bytes)}",
        "sync time": f"{option.seconds * 1e3:.1f} ms",
    }


def _name(option: Option) -> str:
    experts = ", experts on dim 1" if option.expert_dim else ""
    return f"{option.grouping}, dim {option.row_dim}{experts}"


def _reason(best: Option, others: list[Option]) -> str:
    if not others:
        return "It is the only option."
    faster = [o for o in others if o.seconds < best.seconds]
    if faster:
        return (
            f"A sync would take less time with {_name(faster[0])}, but its TP groups cross nodes, "
            "and generation reduces over them twice per layer and token."
        )
    other = others[0]
    if other.seconds < best.seconds * 1.01:
        return f"The difference is small: a sync takes about as long with {_name(other)}."
    if max(best.plan.bytes_sent) < 0.9 * max(other.plan.bytes_sent):
        why = "More ranks share the sending"
    else:
        why = "Engine ranks hold more of what they need in their own shards"
    ratio = other.seconds / max(best.seconds, 1e-9)
    return f"{why}: a sync takes {ratio:.2f} times as long with {_name(other)}."


def _uneven_sending(best: Option) -> str:
    """Return the cause and the remedy if few ranks send most of the bytes, else ""."""
    sent = max(best.plan.bytes_sent)
    if sent < 1.5 * best.received_bytes:
        return ""
    return (
        f" The busiest rank sends {sent / max(best.received_bytes, 1):.1f} times what it receives, "
        "because some weights (fused experts) have fewer rows than there are shards, and dim 1 is "
        "not a multiple of the number of shards. Replicas of fewer shards (HSDP, fsdp_size) "
        "distribute the sending."
    )


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / _MIB:.2f} MiB"


def draw_advice(advice: Advice, path: Path) -> None:
    """Draw the traffic of the recommended option, and bars of all options and the baselines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), dpi=120)
    figure.set_layout_engine("constrained", w_pad=0.12)
    heat, bars = figure.subplots(1, 2, width_ratios=(1, 1.2))
    _draw_traffic(heat, advice.options[0])
    _draw_volumes(bars, advice)
    figure.suptitle(
        f"{advice.num_parameters / 1e9:.2f}B parameters, {advice.world_size} ranks, "
        f"TP {advice.tp_size}, {advice.nodes} node{'s' if advice.nodes > 1 else ''}"
    )
    figure.savefig(path)


def traffic_matrix(plan: ReshardPlan) -> np.ndarray:
    """Return the bytes from each sender to each receiver, int64 [N, N]; the diagonal is 0."""
    itemsizes: dict[SourceClass, int] = defaultdict(int)  # summed over the sources of a class
    for (_, dtype), source_class in plan.source_classes.items():
        itemsizes[source_class] += dtype.itemsize
    matrix = np.zeros((plan.world_size, plan.world_size), np.int64)
    ranks = np.arange(plan.world_size)
    for source_class, itemsize in itemsizes.items():
        needed = source_class.num_needed
        for shard in np.flatnonzero(needed.any(0)).tolist():
            moved = needed[plan.layout_of, shard] * itemsize
            matrix[source_class.senders.sender_of[shard], ranks] += moved
    np.fill_diagonal(matrix, 0)
    return matrix


def _draw_traffic(axes: Axes, option: Option) -> None:
    from matplotlib.colors import LogNorm

    mib = np.ma.masked_equal(traffic_matrix(option.plan), 0) / _MIB
    image = axes.imshow(mib, norm=LogNorm() if mib.count() else None, cmap="viridis")
    title = f"Traffic between ranks, TP groups {option.grouping}"
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("receiving rank")
    axes.set_ylabel("sending rank")
    axes.set_facecolor("#f1f3f5")
    if mib.count():
        axes.figure.colorbar(image, ax=axes, label="MiB per sync", shrink=0.85)


def _draw_volumes(axes: Axes, advice: Advice) -> None:
    named = [("lower bound", advice.options[0].lower_bound_bytes, "#868e96")]
    for option in advice.options:
        name = _name(option).replace(", dim", ",\nrow-parallel on dim")
        named.append((name, option.received_bytes, "#2563eb"))
    if advice.hybridflow_bytes is not None:
        named.append(("HybridFlow's formula", advice.hybridflow_bytes, "#7048e8"))
    named.append(("verl: gather all,\nfloat32", advice.verl_bytes, "#d9480f"))
    labels, sizes, colours = zip(*named, strict=True)
    unit, unit_name = (_MIB * 1024, "GiB") if max(sizes) >= _MIB * 1024 else (_MIB, "MiB")
    drawn = axes.barh(range(len(named)), np.array(sizes) / unit, color=colours)
    axes.set_yticks(range(len(named)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.bar_label(drawn, [_size(s) for s in sizes], padding=4, fontsize=9)
    axes.set_title("Received per rank and sync", loc="left", fontweight="bold")
    axes.set_xlabel(unit_name)
    axes.set_xlim(right=max(sizes) / unit * 1.25 or 1)
    axes.spines[["top", "right"]].set_visible(False)
