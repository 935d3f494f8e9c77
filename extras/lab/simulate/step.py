"""A step of a layout: phases in time on groups of ranks, memory, and what is idle."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridengine.lab.simulate import sync as syncs
from hybridengine.lab.simulate.cluster import Cluster
from hybridengine.lab.simulate.generation import Generation, generate
from hybridengine.lab.simulate.model import Layout, ModelShape, Workload
from hybridengine.lab.simulate.sync import Sync
from hybridengine.lab.simulate.training import Memory, TrainingModel, memory_of

GENERATE, SYNC = "generate", "update_weights"
_CRITIC = "critic"  # the group of a critic's own ranks


@dataclass(frozen=True)
class Phase:
    """One phase on one group of ranks, in seconds from the start of the step."""

    name: str
    group: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True)
class Shortage:
    """A moment of the step that needs more memory on a rank than is usable; bytes by kind."""

    moment: str
    kinds: dict[str, float]
    usable: float

    @property
    def missing(self) -> float:
        return sum(self.kinds.values()) - self.usable

    def __str__(self) -> str:
        largest = sorted(self.kinds.items(), key=lambda item: -item[1])[:3]
        what = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in largest)
        return (
            f"{self.moment} needs {(self.missing + self.usable) / 2**30:.1f} GiB on a rank "
            f"({what}), {self.missing / 2**30:.1f} more than the {self.usable / 2**30:.1f} usable"
        )


@dataclass(frozen=True)
class SimulatedStep:
    """A step of a layout.

    seconds: the time from one step to the next.
    mfu: the MFU of the ranks that train the policy, during its update.
    exposed: the seconds of that update in which ranks wait for FSDP's collectives.
    num_syncs: weight syncs of the step.
    """

    layout: Layout
    phases: tuple[Phase, ...]
    seconds: float
    tokens_per_s: float
    memory: Memory
    sync: Sync
    generation: Generation
    mfu: float
    exposed: float
    num_syncs: int

    def seconds_of(self, name: str) -> float:
        """Seconds of a phase, 0 if the step has none; groups that take part in it do so at once."""
        return max((phase.seconds for phase in self.phases if phase.name == name), default=0.0)

    def utilisation(self, group: str) -> float:
        """Share of the step in which the ranks of a group work."""
        busy = sum(phase.seconds for phase in self.phases if phase.group == group)
        return busy / self.seconds

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(phase.group for phase in self.phases))

    def replace_sync(self, planned: Sync) -> SimulatedStep:
        """Return this step with a planned sync instead of the formula's."""
        phases = tuple(
            replace(phase, seconds=self.num_syncs * planned.seconds)
            if phase.name == SYNC
            else phase
            for phase in self.phases
        )
        seconds = max(phase.end for phase in phases)
        tokens_per_s = self.tokens_per_s * self.seconds / seconds
        return replace(
            self, phases=phases, seconds=seconds, tokens_per_s=tokens_per_s, sync=planned
        )


def simulate_step(
    model: ModelShape, work: Workload, layout: Layout, cluster: Cluster
) -> SimulatedStep | Shortage:
    """Return the step, or which memory is missing."""
    memory = memory_of(model, work, layout, cluster)
    if missing := _missing(model, work, layout, cluster, memory):
        return missing
    kv = model.kv_bytes(layout.tp_size, work.engine_itemsize)
    capacity = _rounded_down(memory.kv_cache / kv)
    generation = generate(model, work, cluster, layout.tp_size, layout.num_engines, capacity)
    sync = syncs.estimate(model, work, layout, cluster)
    phases, exposed, update = _phases(model, work, layout, cluster, generation)
    taking_part = [phase for phase in phases if phase.group != _CRITIC]
    end = max(phase.end for phase in taking_part)
    groups = dict.fromkeys(phase.group for phase in taking_part)
    # Shared weights have to be those of the shards before each optimizer step.
    num_syncs = work.optimizer_steps if layout.share_engine_weights else 1
    phases += [Phase(SYNC, group, end, num_syncs * sync.seconds) for group in groups]
    seconds = max(phase.end for phase in phases)
    flops = TrainingModel(model, work, layout, cluster, layout.actor_ranks).flops()
    return SimulatedStep(
        layout,
        tuple(phases),
        seconds,
        work.tokens / seconds,
        memory,
        sync,
        generation,
        mfu=flops / update / layout.actor_ranks / cluster.device.flops,
        exposed=exposed,
        num_syncs=num_syncs,
    )


def _phases(
    model: ModelShape, work: Workload, layout: Layout, cluster: Cluster, generation: Generation
) -> tuple[list[Phase], float, float]:
    """Return the phases before the sync, exposed seconds of the update, and its seconds."""
    config = work.config
    actor = TrainingModel(model, work, layout, cluster, layout.actor_ranks)
    update, exposed = actor.update()
    alone = replace(layout, share_engine_weights=False)  # no other model is the engine's
    frozen = TrainingModel(model, work, alone, cluster, layout.actor_ranks)
    own: list[tuple[str, float]] = [("offload", actor.offload())]
    own += [("reward_model", frozen.forward_only(head=False))] if config.reward_model else []
    own += [("ref", frozen.forward_only())] if config.reference else []
    own += [("old_log_prob", actor.forward_only())] if config.old_log_probs else []
    updates, values = [("update_actor", update)], list[tuple[str, float]]()
    if config.critic:
        ranks = layout.critic_ranks or layout.actor_ranks
        critic = TrainingModel(model, work, replace(alone, expert_parallel=1), cluster, ranks)
        values = [("values", critic.forward_only(head=False))]
        critic_update = [("update_critic", critic.update(head=False)[0])]
        if not layout.critic_ranks:
            own, updates = own + values, critic_update + updates
    group = "trainer" if layout.is_split else "actor" if layout.critic_ranks else "all ranks"
    start = 0.0 if layout.is_split else generation.seconds
    engine = "engine" if layout.is_split else group
    phases = [Phase(GENERATE, engine, 0.0, generation.seconds)]
    phases += (before := _in_turn(group, start, own))
    if layout.critic_ranks:  # advantages need values, log-probs and those of the reference
        scored = max((phase.end for phase in before if phase.name == "reward_model"), default=start)
        apart = _in_turn(_CRITIC, scored, values)
        start = max(phase.end for phase in (*before, *apart))
        apart += _in_turn(_CRITIC, start, critic_update)
    else:
        start, apart = before[-1].end if before else start, []
    phases += _in_turn(group, start, updates) + apart
    return phases, exposed, update


def _in_turn(group: str, start: float, named: list[tuple[str, float]]) -> list[Phase]:
    phases = []
    for name, seconds in named:
        if seconds:
            phases.append(Phase(name, group, start, seconds))
            start += seconds
    return phases


def _missing(
    model: ModelShape, work: Workload, layout: Layout, cluster: Cluster, memory: Memory
) -> Shortage | None:
    """Return the moment that needs most memory, if more than there is."""
    one = model.kv_bytes(layout.tp_size, work.engine_itemsize) * work.longest_sequence
    moments = dict(memory.moments)
    moments["generate"] = moments["generate"] | {"KV cache of the longest sequence": one}
    worst = max(moments, key=lambda name: sum(moments[name].values()))
    shortage = Shortage(worst, moments[worst], cluster.usable_bytes)
    return shortage if shortage.missing > 0 else None


def _rounded_down(tokens: float) -> int:
    """Round down to two digits, so that layouts with about the same cache are simulated once."""
    digits = max(0, len(str(int(tokens))) - 2)
    return int(tokens) // 10**digits * 10**digits
