"""How much of a recorded step was computation and communication."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
