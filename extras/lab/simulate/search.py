"""Search for the layout with the shortest step, with reasons and runners-up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridengine.lab.simulate.cluster import Cluster
from hybridengine.lab.simulate.config import LayoutConfig, Mode
from hybridengine.lab.simulate.model import Layout, ModelShape, Workload
from hybridengine.lab.simulate.step import Shortage, SimulatedStep, simulate_step
from hybridengine.run.config import ConfigError

_KNOBS = {
    "mode": "mode",
    "trainer_ranks": "trainer ranks",
    "critic_ranks": "ranks of the critic alone",
    "fsdp_size": "FSDP size",
    "tp_size": "TP",
    "sequence_parallel": "SP",
    "expert_parallel": "EP",
    "gradient_checkpointing": "checkpointing",
    "reshard_after_forward": "resharding after forward",
    "offload": "offload",
}
_FRACTIONS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)


@dataclass(frozen=True)
class Result:
    """The result of a search.

    steps: the steps of the feasible layouts, best first.
    reasons: a sentence about each part of the best layout.
    num_layouts: how many layouts were considered.
    refused: how many of them do not fit the memory.
    """

    steps: list[SimulatedStep]
    reasons: list[str]
    num_layouts: int
    refused: int

    @property
    def best(self) -> SimulatedStep:
        return self.steps[0]

    def placements(self) -> list[SimulatedStep]:
        """Return the best step of every placement (colocated or split, critic apart or not)."""
        return _firsts(self.steps, lambda layout: (layout.mode, layout.critic_ranks > 0))

    def runners_up(self, count: int = 4) -> list[SimulatedStep]:
        """Return the next best steps with other groups or another TP size, and all placements."""
        groups = ("mode", "trainer_ranks", "critic_ranks", "tp_size")
        firsts = _firsts(self.steps, lambda layout: tuple(getattr(layout, g) for g in groups))
        chosen = firsts[1 : 1 + count]
        return chosen + [step for step in self.placements()[1:] if step not in chosen]


def _firsts(steps: list[SimulatedStep], key: Callable[[Layout], tuple]) -> list[SimulatedStep]:
    """Return the first step for every key."""
    first: dict[tuple, SimulatedStep] = {}
    for step in steps:
        first.setdefault(key(step.layout), step)
    return list(first.values())


def search(model: ModelShape, work: Workload, cluster: Cluster, fixed: LayoutConfig) -> Result:
    """Simulate every layout that the fixed parts permit.

    Raises ConfigError if there is none, or if none fits the memory; it names what is missing.
    """
    steps: list[SimulatedStep] = []
    refused: dict[Layout, Shortage] = {}
    for layout in layouts(model, work, cluster, fixed):
        step = simulate_step(model, work, layout, cluster)
        if isinstance(step, Shortage):
            refused[layout] = step
        else:
            steps.append(step)
    if not steps:
        raise ConfigError(_nothing_fits(model, cluster, fixed, refused))
    steps.sort(key=_order)
    return Result(steps, _reasons(steps, refused), len(steps) + len(refused), len(refused))


def _order(step: SimulatedStep) -> tuple:
    """Sort by time to two digits; among equals by what is simpler, then by memory."""
    layout = step.layout
    return (
        float(f"{step.seconds:.1e}"),
        layout.is_split,
        layout.offload,
        not layout.reshard_after_forward,
        layout.sequence_parallel,
        layout.expert_parallel,
        step.seconds,
        step.memory.peak[1],
    )


def layouts(
    model: ModelShape, work: Workload, cluster: Cluster, fixed: LayoutConfig
) -> Iterator[Layout]:
    """Yield all layouts of the cluster's ranks that the model's heads permit."""
    for mode in _choices(fixed.mode, ("sync", "one_step_off")):
        for trainer, critic in _groups(mode, work, cluster, fixed):
            actor = trainer - critic
            engine = actor if mode == "sync" else cluster.ranks - trainer
            parts = itertools.product(
                _divisors(fixed.fsdp_size, actor, cluster),
                _tp_sizes(fixed.tp_size, engine, model, cluster),
                _sp_sizes(fixed.sequence_parallel, actor, model, cluster),
                _choices(fixed.gradient_checkpointing, (False, True)),
                _choices(fixed.reshard_after_forward, (True, False)),
                _choices(fixed.offload, (False, True)),
                _ep_sizes(fixed.expert_parallel, actor, model, cluster),
            )
            for fsdp, tp, sp, checkpointing, reshard, offload, ep in parts:
                if ep > 1 and fsdp != actor:  # experts are not divided within replicas
                    continue
                shares = fixed.share_engine_weights
                if shares and (mode != "sync" or ep > 1):  # the engine is on the rank, undivided
                    continue
                if critic % sp == 0 and critic % min(fsdp, critic or 1) == 0:
                    flags = checkpointing, reshard, offload
                    yield Layout(mode, trainer, engine, fsdp, tp, sp, critic, *flags, ep, shares)


def _choices(given: Any, values: Sequence[Any]) -> Sequence[Any]:
    return values if given is None else (given,)


def _groups(
    mode: Mode, work: Workload, cluster: Cluster, fixed: LayoutConfig
) -> Iterator[tuple[int, int]]:
    """Yield (ranks that train, of these the critic's own): nodes, or parts of a single node."""
    ranks = cluster.ranks
    unit = cluster.gpus_per_node if cluster.nodes > 1 else 1
    parts = sorted({round(ranks * f / unit) * unit for f in _FRACTIONS} - {0, ranks})
    trainers = (ranks,) if mode == "sync" else _choices(fixed.trainer_ranks, parts)
    for trainer in trainers:
        apart = {trainer // part // unit * unit for part in (4, 2)} if work.config.critic else set()
        for critic in _choices(fixed.critic_ranks, sorted({0} | apart)):
            if critic < trainer and (mode == "sync" or trainer < ranks):
                yield trainer, critic


def _divisors(given: int | None, ranks: int, cluster: Cluster) -> list[int]:
    """FSDP sizes: divisors of the ranks inside a node, and multiples of a node."""
    node = cluster.gpus_per_node
    sizes = [given] if given else range(1, ranks + 1)
    return [s for s in sizes if ranks % s == 0 and (given or node % s == 0 or s % node == 0)]


def _tp_sizes(given: int | None, ranks: int, model: ModelShape, cluster: Cluster) -> list[int]:
    sizes = _divisors(given, ranks, cluster)
    return [size for size in sizes if model.allows_tp(size) and size <= 64]


def _sp_sizes(given: int | None, ranks: int, model: ModelShape, cluster: Cluster) -> list[int]:
    sizes = [given] if given else [s for s in (1, 2, 4, 8, 16) if s <= cluster.gpus_per_node]
    return [size for size in sizes if ranks % size == 0 and model.heads % size == 0]


def _ep_sizes(given: int | None, ranks: int, model: ModelShape, cluster: Cluster) -> list[int]:
    sizes = [given] if given else [s for s in (1, 2, 4, 8) if s <= cluster.gpus_per_node]
    experts = model.num_experts
    return [s for s in sizes if s == 1 or (experts and ranks % s == 0 and experts % s == 0)]


def describe(layout: Layout) -> str:
    """Return the layout in a line."""
    shards = f"FSDP {layout.fsdp_size}"
    if layout.replicas > 1:
        shards = f"HSDP {layout.replicas} x {layout.fsdp_size}"
    parts = [shards, f"TP {layout.tp_size} x {layout.num_engines} engines"]
    if layout.sequence_parallel > 1:
        parts.append(f"SP {layout.sequence_parallel}")
    if layout.expert_parallel > 1:
        parts.append(f"EP {layout.expert_parallel}")
    if layout.is_split:
        where = f"split, {layout.trainer_ranks} train and {layout.engine_ranks} generate"
    else:
        where = f"colocated on {layout.engine_ranks} ranks"
    if layout.critic_ranks:
        parts.append(f"critic on {layout.critic_ranks} of its own")
    flags = {
        "checkpointing": layout.gradient_checkpointing,
        "weights kept gathered": not layout.reshard_after_forward,
        "offload": layout.offload,
        "engine's weights shared": layout.share_engine_weights,
    }
    return ", ".join([where, *parts, *(name for name, on in flags.items() if on)])


def _reasons(steps: list[SimulatedStep], refused: dict[Layout, Shortage]) -> list[str]:
    """Compare the best layout with the best one of every other value of each part."""
    best, reasons = steps[0], []
    for knob, name in _KNOBS.items():
        own = getattr(best.layout, knob)
        others = [step for step in steps if getattr(step.layout, knob) != own]
        if knob == "trainer_ranks":  # the mode decides it otherwise
            others = [step for step in others if step.layout.mode == best.layout.mode]
        if others:
            fastest = min(others, key=lambda step: step.seconds)
            reasons.append(_reason(name, own, getattr(fastest.layout, knob), best, fastest))
        elif alike := _refused_alternatives(best.layout, knob, refused):
            value, missing = alike
            reasons.append(f"{name} {_text(own)}: with {_text(value)}, {missing}")
    return reasons


def _reason(name: str, own: object, other: object, best: SimulatedStep, step: SimulatedStep) -> str:
    slower = step.seconds / best.seconds - 1
    sentence = f"{name} {_text(own)}: {_text(other)} is {slower:.1%} slower at best"
    if abs(slower) < 0.005:
        return f"{name} {_text(own)}: {_text(other)} is as fast"
    if slower < 0:
        return f"{name} {_text(own)}: {_text(other)} is {-slower:.1%} faster, less than the error"
    if best.layout.is_split != step.layout.is_split:
        pairs = [(s.seconds_of("generate"), s.seconds_of("update_actor")) for s in (step, best)]
        there, here = (f"{generate:.1f} and {update:.1f}" for generate, update in pairs)
        return f"{sentence} (generate and update_actor {there} s instead of {here})"
    differences = {
        phase: step.seconds_of(phase) - best.seconds_of(phase)
        for phase in {p.name for p in (*best.phases, *step.phases)}
    }
    phase = max(differences, key=lambda p: differences[p])
    before, after = best.seconds_of(phase), step.seconds_of(phase)
    return f"{sentence} ({phase} {after:.1f} s instead of {before:.1f})"


def _refused_alternatives(
    layout: Layout, knob: str, refused: dict[Layout, Shortage]
) -> tuple[object, Shortage] | None:
    """Return (value, what is missing) of a refused layout that differs in `knob` alone."""
    own = getattr(layout, knob)
    for other, missing in refused.items():
        if replace(other, **{knob: own}) == layout:
            return getattr(other, knob), missing
    return None


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _nothing_fits(
    model: ModelShape, cluster: Cluster, fixed: LayoutConfig, refused: dict[Layout, Shortage]
) -> str:
    ranks = f"{cluster.nodes} x {cluster.gpus_per_node} ranks"
    if not refused:
        given = {k: v for k, v in fixed.__dict__.items() if v is not None}
        return (
            f"layout is {given}, which no layout of the {ranks} of the cluster and the model's "
            f"{model.heads} attention heads has; change a size so that it divides both"
        )
    layout, missing = min(refused.items(), key=lambda item: item[1].missing)
    return (
        f"no layout of the {ranks} of cluster fits the {model.num_parameters / 1e9:.2f}B "
        f"parameters: at best ({describe(layout)}) {missing}; add nodes, take a GPU with more "
        "memory, or lower workload.max_tokens_per_gpu"
    )
