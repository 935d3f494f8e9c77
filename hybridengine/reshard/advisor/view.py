"""The advisor's answer as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from hybridengine.reshard.advisor.advise import Advice, Option

__all__ = ["draw_advice", "print_advice"]

_MIB = 2.0**20


def print_advice(advice: Advice, console: Console) -> None:
    """Options, best first, and what others move in the same case."""
    n, t = advice.world_size, advice.tp_size
    console.print(
        f"[bold]{advice.num_parameters / 1e9:.2f}B parameters, {n} ranks on {advice.nodes} "
        f"node{'s' if advice.nodes > 1 else ''}, {n // t} engines of TP {t}; per rank and sync:"
    )
    shown = advice.options[:6]  # what fits a terminal; they are sorted
    rows = [_row(option) for option in shown]
    names = [_name(option).replace(", ", ",\n") for option in shown]
    table = Table(
        "TP groups,\nrow-parallel", *names, box=None, pad_edge=False
    )  # an option a column: fits 80 columns
    for key in rows[0]:
        table.add_row(f"[bold]{key}", *(row[key] for row in rows))
    console.print(table)
    console.print(
        f"Received by others: {_size(advice.hybridflow_bytes)} (HybridFlow's formula), "
        f"{_size(advice.verl_bytes)} (verl: gathers all, in float32)."
    )
    best, others = advice.options[0], advice.options[1:]
    reasons = f"{_reason(best, others)}{_of_senders(best)}"
    console.print(f"Recommended: [bold]{_name(best)}[/bold]. {reasons}")
    for name, why in advice.fallback.items():
        console.print(f"gathered whole: {name} ({why})", markup=False)


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
        return "There is nothing to choose."
    faster = [o for o in others if o.seconds < best.seconds]
    if faster:
        return (
            f"A sync would take less with {_name(faster[0])}, but its TP groups cross nodes, and "
            "generation reduces over them twice per layer and token."
        )
    other = others[0]
    if other.seconds < best.seconds * 1.01:
        return f"It hardly matters here: with {_name(other)} a sync takes as long."
    spread = max(best.plan.bytes_sent) < 0.9 * max(other.plan.bytes_sent)
    why = (
        "The sending is spread over more ranks"
        if spread
        else ("More of what an engine rank needs is in its own shards")
    )
    return (
        f"{why}: a sync takes "
        f"{other.seconds / max(best.seconds, 1e-9):.2f} times as long with {_name(other)}."
    )


def _of_senders(best: Option) -> str:
    """What to do where few ranks send what all receive."""
    sent = max(best.plan.bytes_sent)
    if sent < 1.5 * best.received_bytes:
        return ""
    return (
        f" Its busiest rank sends {sent / max(best.received_bytes, 1):.1f} times what it receives, "
        "because some weights (fused experts) have fewer rows than there are shards and a second "
        "dimension that does not divide by these: replicas of fewer shards (HSDP, fsdp_size) "
        "spread the sending."
    )


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / _MIB:.2f} MiB"


def draw_advice(advice: Advice, path: Path) -> None:
    """Who sends to whom under the recommended option, and bars against the others."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), dpi=120, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)  # type: ignore[union-attr]
    FigureCanvasAgg(figure)
    heat, bars = figure.subplots(1, 2, width_ratios=(1, 1.2))
    best = advice.options[0]
    mib = np.ma.masked_equal(best.plan.traffic(), 0) / _MIB
    image = heat.imshow(mib, norm=LogNorm() if mib.count() else None, cmap="viridis")
    heat.set_title(f"Who sends to whom, TP groups {best.grouping}", loc="left", fontweight="bold")
    heat.set_xlabel("receiving rank")
    heat.set_ylabel("sending rank")
    heat.set_facecolor("#f1f3f5")
    if mib.count():
        figure.colorbar(image, ax=heat, label="MiB per sync", shrink=0.85)
    named = [("lower bound", best.lower_bound_bytes, "#868e96")]
    named += [
        (_name(o).replace(", ", ",\nrows on "), o.received_bytes, "#2563eb") for o in advice.options
    ]
    named += [
        ("HybridFlow's formula", advice.hybridflow_bytes, "#7048e8"),
        ("verl: gather all,\nfloat32", advice.verl_bytes, "#d9480f"),
    ]
    labels, sizes, colours = zip(*named, strict=True)
    unit, name = (_MIB * 1024, "GiB") if max(sizes) >= _MIB * 1024 else (_MIB, "MiB")
    drawn = bars.barh(range(len(named)), np.array(sizes) / unit, color=colours)
    bars.set_yticks(range(len(named)), labels, fontsize=9)
    bars.invert_yaxis()
    bars.bar_label(drawn, [_size(s) for s in sizes], padding=4, fontsize=9)
    bars.set_title("Received per rank and sync", loc="left", fontweight="bold")
    bars.set_xlabel(name)
    bars.set_xlim(right=max(sizes) / unit * 1.25 or 1)
    bars.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{advice.num_parameters / 1e9:.2f}B parameters, {advice.world_size} ranks, "
        f"TP {advice.tp_size}, {advice.nodes} node{'s' if advice.nodes > 1 else ''}"
    )
    figure.savefig(path)
