"""Jobs whose engine takes every update in the middle of responses, against an oracle."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.version_oracle import logits_by_version
from tests.extras.remote.overlapped import run_jobs, update_inside_items
from tests.ranks import run_ranks
from tests.train.in_process import Result, small_job

pytestmark = pytest.mark.multirank

STEPS, PAUSE = 3, 3  # updates come after this many tokens
SETTINGS = {
    "data.max_response_length": 8,
    "rollout.n_gpus_per_node": 1,
    "trainer.mode": "async",
    "trainer.staleness": 2,
    "trainer.total_training_steps": STEPS,
}
MODES = ("keep_kv", "recompute_kv")


def body(rank: int, num_ranks: int, folder: Path, jobs: Any) -> Any:
    """(results, (number, version) of each item that the engine announced, its weights of each job).

    The engine waits for each update after PAUSE tokens.
    """
    from hybridengine.remote.overlap import worker
    from hybridengine.remote.overlap.queue import EngineQueue

    announced, steps = list[tuple[int, int]](), itertools.count()
    weights = list[dict[int, Any]]()  # of each job, by version
    run, update, send = worker.RolloutWorker.run, worker.RolloutWorker.update, EngineQueue.send

    def begin() -> None:
        nonlocal steps
        steps = itertools.count(1)

    def running(self: Any) -> None:
        weights.append({})
        run(self)

    def copying(self: Any) -> None:
        update(self)
        engine = self._engine
        weights[-1][engine.weight_version] = {
            n: t.clone() for n, t in engine.target.weights().items()
        }

    def noting(self: Any, item: Any, rollouts: Any, version: int, seconds: Any) -> None:
        announced.append((item.number, version))
        send(self, item, rollouts, version, seconds)

    update_inside_items(begin, lambda: next(steps) == PAUSE, lambda: None)
    worker.RolloutWorker.run, worker.RolloutWorker.update = running, copying  # type: ignore[method-assign]
    EngineQueue.send = noting  # type: ignore[method-assign]
    return run_jobs(rank, num_ranks, folder, jobs), announced, weights


def test_every_update_is_taken_inside_responses(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = dict(o.split("=", 1) for o in small_job(tmp_path)) | SETTINGS
    jobs = [
        base | {"trainer.default_local_dir": tmp_path / m, "rollout.in_flight_update": m}
        for m in MODES
    ]
    settings = [[f"{key}={value}" for key, value in job.items()] for job in jobs]
    (results, *_), (_, announced, weights) = run_ranks(body, 2, tmp_path, settings, timeout_s=400)
    assert announced == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2)] * 2
    for mode, run, weights_of in zip(MODES, results, weights, strict=True):
        assert not run.refused
        models = {}
        for version, state in weights_of.items():
            models[version] = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
            models[version].load_state_dict(state, strict=False)  # the tied head is not in it
        for step in range(1, STEPS + 1):
            check_step(run, step, models, mode == "keep_kv")


def check_step(run: Result, step: int, models: Any, keep_kv: bool) -> None:
    rows = run.rollouts[f"step_{step}"]
    runs = [r.get("weight_versions", [[r["weight_version"], len(r["log_probs"])]]) for r in rows]
    for row, versions in zip(rows, runs, strict=True):
        logits = logits_by_version(
            models, row["prompt_ids"], row["response_ids"], versions, keep_kv
        )
        chosen = torch.tensor(row["response_ids"])[:, None]
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        torch.testing.assert_close(torch.tensor(row["log_probs"]), expected, atol=1e-4, rtol=0)
    named = {
        (version, checksum)
        for row, versions in zip(rows, runs, strict=True)
        for (version, _), checksum in zip(
            versions, row.get("weights_checksums", [row["weights_checksum"]]), strict=True
        )
    }
    assert len(named) == len(dict(named)) == len({checksum for _, checksum in named})
    wanted = {(0,)} if step == 1 else {(step - 2, step - 1), (step - 1,)}
    found = {tuple(v for v, _ in versions) for versions in runs}
    assert wanted <= found <= wanted | {(step - 2,)}  # some end before the update
    partial = [versions for versions in runs if len(versions) > 1]
    assert all(versions[0] == [step - 2, PAUSE] for versions in partial)
    [metrics] = [r for r in run.rows if r["step"] == step and "actor/pg_loss" in r]
    ages = [
        sum((step - 1 - v) * n for v, n in versions) / sum(n for _, n in versions)
        for versions in runs
    ]
    mean = metrics["fully_async/trajectory_staleness/mean"]
    assert mean == pytest.approx(sum(ages) / len(ages)) and mean == 0 if step == 1 else mean > 0
    assert metrics["fully_async/trajectory_staleness/max"] == min(step - 1, 1)
    assert metrics["fully_async/partial/total_partial_num"] == len(partial)
    assert metrics["fully_async/partial/partial_ratio"] == len(partial) / len(rows)
    assert metrics["fully_async/partial/max_partial_span"] == min(step - 1, 1)
    assert metrics["fully_async/count/dropped_stale_samples"] == 0
    seconds = {n: x for n, x in metrics.items() if n.startswith("timing_s/rollouter/")}
    assert all(x >= 0 for x in seconds.values())
