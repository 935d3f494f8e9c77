"""The profiler's trace of a step: its phases, computation and communication."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hybridengine.lab.diagnose.findings import LoggedRun
from hybridengine.lab.diagnose.report import TraceSummary, facts_of, summarize
from tests.train.in_process import run_jobs, small_job


def write_trace(folder: Path, *events: tuple[str, str, float, float]) -> Path:
    """Write events: category, name, start and duration in seconds."""
    rows = [
        {"ph": "X", "cat": cat, "name": name, "ts": start * 1e6, "dur": seconds * 1e6}
        for cat, name, start, seconds in events
    ]
    file = folder / "trace.json.gz"
    with gzip.open(file, "wt") as text:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name"}, *rows]}, text)
    return file


KERNELS_AND_COLLECTIVES = (
    ("user_annotation", "phase: update_weights", 1, 2),
    ("user_annotation", "phase: update_weights", 8, 1),
    ("cpu_op", "aten::mm", 0, 10),
    ("kernel", "gemm", 2, 3),
    ("kernel", "softmax", 4, 2),
    ("kernel", "ncclDevKernel_AllGather", 5, 2),
)
OPERATORS_ALONE = (
    ("cpu_op", "aten::linear", 0, 3),
    ("cpu_op", "aten::mm", 1, 1),
    ("user_annotation", "gloo:all_reduce", 2, 3),
)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (KERNELS_AND_COLLECTIVES, TraceSummary(10, 4, 2, 1, {"update_weights": 3})),
        (OPERATORS_ALONE, TraceSummary(5, 3, 3, 1, {})),
    ],
)
def test_computing_and_communicating(tmp_path: Path, events: tuple, expected: TraceSummary) -> None:
    """Operators count where there are no kernels; what overlaps is counted once."""
    assert summarize(write_trace(tmp_path, *events)) == expected


@pytest.mark.multirank
def test_one_step_of_a_job_is_recorded(tmp_path: Path) -> None:
    job = [*small_job(tmp_path), "trainer.total_training_steps=3", "trainer.trace_step=2"]
    [result] = run_jobs(tmp_path, [job], world_size=2)
    files = [f"step2_rank{rank}.json.gz" for rank in range(2)]
    run = LoggedRun(tmp_path / "run")
    assert sorted(path.name for path in (run.folder / "trace").iterdir()) == files
    trace = summarize(run.folder / "trace" / files[1])
    timed = {name for name in result.rows[1] if name.startswith("timing_s/")}
    assert {f"timing_s/{phase}" for phase in trace.phases} <= timed
    assert {"gen", "update_actor", "update_weights"} <= trace.phases.keys()
    assert trace.computing > 0 and trace.communicating > 0
    assert max(trace.phases.values()) <= trace.span  # a phase inside another counts in both
    facts = dict(facts_of(run))
    assert "weight sync" in facts[f"trace/{files[0]}"]
