"""The report of `hybridengine diagnose`, with what a recorded step spent on communication."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np
from rich.console import Console

from hybridengine.lab.diagnose.findings import LoggedRun, find_problems, phase_table, phases_of
from hybridengine.run.session import PHASE

_COMMUNICATION = ("nccl", "gloo:")  # names of kernels and of asynchronous operations


@dataclass(frozen=True)
class TraceSummary:
    """Seconds of a recorded step.

    span: the time from the first to the last event.
    computing: the time in which a kernel runs, or, in a trace without kernels, an operator.
    communicating: the time in which a collective is under way.
    both: the time in which both are under way.
    phases: the time of each phase, by name.
    """

    span: float
    computing: float
    communicating: float
    both: float
    phases: dict[str, float]


def summarize(file: Path) -> TraceSummary:
    """Read a trace that `StepTrace` has written."""
    with gzip.open(file) as lines:
        events = json.load(lines)["traceEvents"]
    spans = [e for e in events if e.get("ph") == "X" and e.get("dur", 0) > 0]
    collectives = [e for e in spans if e["name"].startswith(_COMMUNICATION)]
    kernels = [
        e for e in spans if e.get("cat") == "kernel" and not e["name"].startswith(_COMMUNICATION)
    ]
    operators = [e for e in spans if e.get("cat") == "cpu_op" and e["name"].startswith("aten::")]
    phases = dict[str, float]()
    for event in spans:
        if event["name"].startswith(PHASE):
            name = event["name"].removeprefix(PHASE)
            phases[name] = phases.get(name, 0.0) + event["dur"] / 1e6
    computing, communicating = _joined(kernels or operators), _joined(collectives)
    whole = _joined(spans)
    return TraceSummary(
        span=float(whole[-1, 1] - whole[0, 0]) if len(whole) else 0.0,
        computing=_length(computing),
        communicating=_length(communicating),
        both=_length(computing) + _length(communicating) - _length(np.r_[computing, communicating]),
        phases=phases,
    )


def _joined(events: Iterable[dict]) -> np.ndarray:
    """Return the times in which at least one event is under way: seconds [N, 2], in order."""
    times = np.array([(e["ts"], e["ts"] + e["dur"]) for e in events], np.float64).reshape(-1, 2)
    return _union(times / 1e6)


def _union(times: np.ndarray) -> np.ndarray:
    if not len(times):
        return times
    times = times[np.argsort(times[:, 0])]
    ends = np.maximum.accumulate(times[:, 1])
    first = np.r_[True, times[1:, 0] > ends[:-1]]
    last = np.r_[first[1:], True]
    return np.stack([times[first, 0], ends[last]], 1)


def _length(times: np.ndarray) -> float:
    union = _union(times)
    return float((union[:, 1] - union[:, 0]).sum())


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
    if parity := run.parity:
        point, difference = parity["first_inexact"] or ("none", 0.0)
        yield (
            "engine and trainer",
            f"the first operator that is not equal bit for bit: {point} ({difference:.1e}); KL "
            f"{parity['kl']:.1e}, largest ratio {parity['largest_ratio']:.4g} of "
            f"{parity['num_tokens']} tokens; correction: {parity['correction']}",
        )
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
