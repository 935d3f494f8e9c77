"""A simulation from its configuration, and its result as tables, JSON and a picture of the step."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig

from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.lab.simulate.cluster import Cluster
from hybridengine.lab.simulate.config import SimulationConfig
from hybridengine.lab.simulate.model import ModelShape, Workload
from hybridengine.lab.simulate.search import Result, describe, search
from hybridengine.lab.simulate.step import SimulatedStep
from hybridengine.lab.simulate.sync import SyncPlanner
from hybridengine.lab.simulate.training import moment_bytes, muon_exchange
from hybridengine.model.parameters import checkpoint_layout_from_config
from hybridengine.run.errors import ConfigNote, ModelError, reason_of


@dataclass(frozen=True)
class Simulation:
    """What was simulated, and the result."""

    config: SimulationConfig
    model: ModelShape
    work: Workload
    cluster: Cluster
    result: Result


def simulate(config: SimulationConfig, *, plan_sync: bool = True) -> Simulation:
    """Simulate every layout of the configuration.

    plan_sync: plan the weight sync of the best layout with the reshard planner, which records
    vLLM's loader; else, and where that is impossible (a ConfigNote says why), it is a closed form.
    Raises ModelError for a model that cannot be read, ConfigError if no layout fits.
    """
    trust = config.model.trust_remote_code
    hf_config = _read_config(config.model.path, trust)
    shapes = checkpoint_layout_from_config(hf_config, trust).parameters
    model = ModelShape.of(hf_config, shapes)
    work, cluster = Workload(config.workload), Cluster.of(config.cluster)
    result = search(model, work, cluster, config.layout)
    if plan_sync:
        planner = SyncPlanner(hf_config, trust, work, cluster)
        result = _with_planned_sync(result, planner)
    return Simulation(config, model, work, cluster, result)


def _read_config(path: str, trust_remote_code: bool) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:  # KeyError: an unknown model type
        raise ModelError(
            f"model.path is {path!r}, whose config.json cannot be read ({reason_of(error)}); give "
            "a folder with config.json, or the name of a model in the local cache or the hub"
        ) from error


def _with_planned_sync(result: Result, planner: SyncPlanner) -> Result:
    if not vllm_available():
        reason = "vLLM, whose loader it records, is not installed"
    else:
        try:
            planned = result.best.replace_sync(planner.plan(result.best.layout))
            return replace(result, steps=[planned, *result.steps[1:]])
        except (OSError, ValueError, RuntimeError) as error:
            reason = reason_of(error)
    note = f"the weight sync is estimated by a formula instead of the planner: {reason}"
    warnings.warn(note, ConfigNote, stacklevel=3)
    return result


_GIB = 2.0**30
_COLOURS = {
    "generate": "#2563eb",
    "offload": "#adb5bd",
    "reward_model": "#f59f00",
    "ref": "#7048e8",
    "old_log_prob": "#9775fa",
    "values": "#20c997",
    "update_critic": "#0ca678",
    "update_actor": "#d9480f",
    "update_weights": "#212529",
}


def print_simulation(simulation: Simulation, console: Console) -> None:
    """Print the best layout: phases, memory, sync, reasons; then the runners-up."""
    model, work, result = simulation.model, simulation.work, simulation.result
    best, cluster = result.best, simulation.config.cluster
    console.print(
        f"[bold]{model.num_parameters / 1e9:.2f}B parameters, {cluster.nodes} x "
        f"{cluster.gpus_per_node} {cluster.gpu}, {work.num_responses} responses of "
        f"{work.lengths.mean():.0f} tokens (at most {work.lengths.max()}) a step"
    )
    console.print(f"Best of {result.num_layouts} layouts ({result.refused} do not fit the memory):")
    console.print(f"[bold green]{describe(best.layout)}[/]", soft_wrap=True)
    console.print(
        f"{best.seconds:.2f} s a step, {best.tokens_per_s:,.0f} tokens/s, "
        f"{best.tokens_per_s / simulation.cluster.ranks:,.0f} per rank; MFU of the update "
        f"{best.mfu:.0%}; busy: {_utilisation(best)}"
    )
    console.print(_phase_table(best))
    console.print(_memory_table(best))
    console.print(
        f"{simulation.cluster.usable_bytes / _GIB:.1f} GiB usable, the KV cache takes the rest; "
        f"the fused head avoids logits of {best.memory.avoided_logits / _GIB:.2f} GiB"
    )
    console.print(_sync_line(best))
    if work.config.optimizer == "muon":
        console.print(_muon_line(simulation))
    console.print("[bold]Why this layout")
    for reason in result.reasons:
        console.print(f"  {reason}", soft_wrap=True, markup=False, highlight=False)
    if runners_up := result.runners_up():
        console.print(_runners_up_table(best, runners_up))


def _utilisation(step: SimulatedStep) -> str:
    return ", ".join(f"{group} {step.utilisation(group):.0%}" for group in step.groups)


def _phase_table(step: SimulatedStep) -> Table:
    generation = step.generation
    notes = {
        "generate": f"prefill {generation.prefill:.2f}, decode {generation.decode:.2f}, of it the "
        f"tail {generation.tail:.2f}; {generation.mean_batch:.0f} sequences at once"
        + (f", {generation.preempted:.0%} preempted" if generation.preempted else ""),
        "update_actor": f"{step.exposed:.2f} waiting for all-gathers and reduce-scatters",
    }
    table = Table("phase", "ranks", "start s", "seconds", "share", "", box=None, pad_edge=False)
    for phase in step.phases:
        share = f"{phase.seconds / step.seconds:.0%}"
        start, seconds = f"{phase.start:.2f}", f"{phase.seconds:.2f}"
        table.add_row(phase.name, phase.group, start, seconds, share, notes.get(phase.name, ""))
    return table


def _memory_table(step: SimulatedStep) -> Table:
    """Return GiB on a rank: a row per kind, a column per moment."""
    moments = step.memory.moments
    kinds = list(dict.fromkeys(kind for sizes in moments.values() for kind in sizes))
    table = Table("GiB on a rank", *moments, box=None, pad_edge=False)
    for kind in kinds:
        sizes = [moments[moment].get(kind) for moment in moments]
        table.add_row(kind, *("" if size is None else f"{size / _GIB:.2f}" for size in sizes))
    cache = {"generate": step.memory.kv_cache}
    table.add_row("KV cache", *(f"{cache[m] / _GIB:.2f}" if m in cache else "" for m in moments))
    totals = [sum(sizes.values()) + cache.get(m, 0.0) for m, sizes in moments.items()]
    table.add_row("[bold]in all", *(f"[bold]{total / _GIB:.2f}" for total in totals))
    return table


def _sync_line(step: SimulatedStep) -> str:
    sync = step.sync
    how = "planned" if sync.source == "planner" else "by HybridFlow's formula"
    return (
        f"Weight sync ({how}): {sync.seconds * 1e3:.0f} ms; the busiest rank receives "
        f"{sync.received / _GIB:.2f} GiB (lower bound {sync.lower_bound / _GIB:.2f}) and sends "
        f"{sync.sent / _GIB:.2f}"
    )


def _muon_line(simulation: Simulation) -> str:
    model, layout = simulation.model, simulation.result.best.layout
    flops, received = muon_exchange(model, layout.fsdp_size, layout.actor_ranks)
    moments = moment_bytes(model, simulation.work) / layout.fsdp_size
    return (
        f"Muon: {moments / _GIB:.2f} GiB of moments on a rank; for an update it computes "
        f"{flops / 1e12:.1f} TFLOP and receives {received / 2**20:.0f} MiB"
    )


def _runners_up_table(best: SimulatedStep, steps: list[SimulatedStep]) -> Table:
    table = Table("runner-up", "step s", "slower", "generate", "update", box=None, pad_edge=False)
    for step in steps:
        table.add_row(
            describe(step.layout),
            f"{step.seconds:.2f}",
            f"{step.seconds / best.seconds - 1:.1%}",
            f"{step.seconds_of('generate'):.2f}",
            f"{step.seconds_of('update_actor'):.2f}",
        )
    return table


def as_dict(simulation: Simulation) -> dict[str, Any]:
    """Return all of it as JSON types: seconds, bytes, tokens per second."""
    result = simulation.result
    return {
        "config": asdict(simulation.config),
        "num_parameters": simulation.model.num_parameters,
        "num_layouts": result.num_layouts,
        "refused": result.refused,
        "best": _step_dict(result.best),
        "reasons": result.reasons,
        "runners_up": [_step_dict(step) for step in result.runners_up()],
    }


def _step_dict(step: SimulatedStep) -> dict[str, Any]:
    return {
        "layout": asdict(step.layout),
        "seconds": step.seconds,
        "tokens_per_s": step.tokens_per_s,
        "mfu": step.mfu,
        "exposed_s": step.exposed,
        "utilisation": {group: step.utilisation(group) for group in step.groups},
        "phases": [asdict(phase) for phase in step.phases],
        "generation": asdict(step.generation),
        "sync": asdict(step.sync),
        "memory": asdict(step.memory),
    }


def draw_timeline(simulation: Simulation, path: Path) -> None:
    """Draw the phases of a step on each group of ranks, for the best layout of each placement."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    steps = simulation.result.placements()
    rows = sum(len(step.groups) for step in steps)
    figure = Figure(figsize=(11, 1.9 + 0.42 * rows + 0.4 * len(steps)), dpi=120)
    figure.set_layout_engine("constrained")
    longest = max(step.seconds for step in steps)
    heights = [len(step.groups) for step in steps]
    all_axes = figure.subplots(len(steps), 1, sharex=True, height_ratios=heights, squeeze=False)
    for axes, step in zip(all_axes[:, 0], steps, strict=True):
        _draw_step(axes, step, longest)
    all_axes[-1, 0].set_xlabel("seconds")
    names = dict.fromkeys(phase.name for step in steps for phase in step.phases)
    patches = [Patch(color=_COLOURS[name], label=name) for name in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    parameters = simulation.model.num_parameters / 1e9
    cluster = simulation.config.cluster
    figure.suptitle(
        f"A step of {parameters:.2f}B parameters on {cluster.nodes} x {cluster.gpus_per_node} "
        f"{cluster.gpu}, simulated: the best layout of each placement"
    )
    figure.savefig(path)


def _draw_step(axes: Any, step: SimulatedStep, longest: float) -> None:
    groups = step.groups
    for phase in step.phases:
        row = groups.index(phase.group)
        axes.barh(row, phase.seconds, left=phase.start, color=_COLOURS[phase.name], height=0.7)
        if phase.seconds > 0.05 * longest:
            centre = phase.start + phase.seconds / 2
            label = f"{phase.seconds:.1f} s"
            axes.text(centre, row, label, ha="center", va="center", color="white", fontsize=9)
    axes.set_yticks(range(len(groups)), groups)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.02)
    axes.axvline(step.seconds, color="#868e96", linestyle=":", linewidth=1)
    title = f"{describe(step.layout)}: {step.seconds:.1f} s"
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
