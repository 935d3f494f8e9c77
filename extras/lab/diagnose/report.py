"""The report of `hybridengine diagnose`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median

from rich.console import Console

from hybridengine.lab.diagnose.findings import find_problems, phase_table, phases_of
from hybridengine.lab.diagnose.runs import LoggedRun
from hybridengine.lab.diagnose.trace import TraceSummary, summarize

__all__ = ["facts_of", "print_report"]


def print_report(run: LoggedRun, console: Console) -> None:
    """Print where the time goes, the sync and the memory of a run, and its problems."""
    phases, problems = phases_of(run), find_problems(run)
    if phases:
        step = sum(phase.seconds for phase in phases)
        console.print(f"[bold]A step takes {step:.2f} s[/], the mean after the first step")
        console.print(phase_table(phases))
    for name, text in facts_of(run):
        console.print(f"[bold]{name}[/]: {text}")
    console.print()
    for k, problem in enumerate(problems, 1):
        console.print(f"[bold yellow]{k}. {problem.subject}[/]: {problem.text}.")
        keys = f" ({', '.join(problem.keys)})" if problem.keys else ""
        console.print(f"   [bold]→[/] {problem.advice}{keys}", highlight=False)
    if not problems:
        console.print("[bold green]The metrics show no problem.")


def facts_of(run: LoggedRun) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the facts that no threshold judges."""
    communication = [phase for phase in phases_of(run) if phase.is_communication]
    if communication:
        share = sum(phase.share for phase in communication)
        yield "communication", f"{share:.1%} of the step, the rest is computation and waiting"
    if times := list(run.series("reshard/ms").values()):
        sent = list(run.series("reshard/bytes_sent").values()) or [0.0]
        yield (
            "weight sync",
            f"median {median(times):.1f} ms, slowest {max(times):.1f} ms; "
            f"{fmean(sent) / 2**20:.1f} MiB sent by a rank per step",
        )
    peaks = {
        "GPU memory reserved": "perf/max_memory_reserved_gb",
        "memory of rank 0": "perf/cpu_memory_used_gb",
    }
    for name, metric in peaks.items():
        if values := run.series(metric):
            yield name, f"at most {max(values.values()):.2f} GiB"
    if values := run.series("perf/throughput"):
        yield "throughput", f"{median(values.values()):,.0f} tokens per second and rank (median)"
    for file in sorted(run.folder.glob("trace/*.json.gz")):
        yield f"trace/{file.name}", _text_of(summarize(file))


def _text_of(trace: TraceSummary) -> str:
    text = f"{trace.span:.2f} s: {trace.computing:.2f} s computing, "
    text += f"{trace.communicating:.2f} s communicating, {trace.both:.2f} s of it while computing"
    if trace.communicating:
        text += f"; computation to communication {trace.computing / trace.communicating:.1f}"
    if sync := trace.phases.get("update_weights"):
        text += f"; weight sync {sync * 1e3:.1f} ms"
    return text
