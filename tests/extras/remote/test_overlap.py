"""Trainer ranks and engine ranks: what is generated with which weights, and what is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridengine.run.errors import EXIT_STOPPED
from tests.extras.remote.overlapped import MULTI_TURN, overrides_of, run_named, run_overlapped
from tests.train.in_process import Result, small_job
from tests.train.toy import assert_named_when_killed

pytestmark = pytest.mark.multirank

STEPS = 4
ONE_ENGINE = ("rollout.n_gpus_per_node=1",)
ONE_STEP = (*ONE_ENGINE, "trainer.mode=one_step_off")
TURNS = (*MULTI_TURN, "model.path={dir}/stopping")
FROZEN = "actor.optim.lr=1e-50"  # 0 in float32: not even weights of 0 change
JOBS = {
    "sync": (),
    "frozen": (FROZEN,),
    "on_policy": (*ONE_STEP, "trainer.staleness=0"),
    "one_step": (*ONE_STEP, "trainer.save_freq=2"),
    "resumed": (
        *ONE_STEP,
        "trainer.resume_mode=path",
        "trainer.resume_from_path={dir}/one_step/global_step_2",
    ),
    "turns": TURNS,
    "turns_on_policy": (*TURNS, *ONE_STEP, "trainer.staleness=0"),
    "filtered": (
        *ONE_STEP,
        "algorithm.filter_groups.enable=true",
        "rollout.n=2",
        "algorithm.filter_groups.max_num_gen_batches=2",
        "reward.custom_reward_function.name=picky",
        "trainer.save_freq=1",
    ),
    "async": (*ONE_ENGINE, "trainer.mode=async", "rollout.max_num_seqs=4", "trainer.staleness=2"),
}


# Rewards are scored in child processes of the engine ranks.
STOPPING = """
import psutil
sent = []

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if not sent:
        sent.append(psutil.Process().parent().parent().terminate())  # rank, its guard, this worker
    return len(solution_str) / 10
"""


def base_of(folder: Path) -> list[str]:
    steps = f"trainer.total_training_steps={STEPS}"
    return [*small_job(folder), steps, f"data.val_files={folder}/rows.jsonl"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("overlap")
    return run_named(folder, base_of(folder), JOBS, num_ranks=2)


def steps_of(result: Result) -> list[dict[str, float]]:
    return [row for row in result.rows if "actor/pg_loss" in row]


def sampled(result: Result, step: int | str) -> list[Any]:
    """What was sampled in a step, with its log-probs."""
    name = f"step_{step}" if isinstance(step, int) else step
    return [(r["index"], r["response_ids"], r["log_probs"]) for r in result.rollouts[name]]


def versions(result: Result, step: int) -> set[int]:
    return {row["weight_version"] for row in result.rollouts[f"step_{step}"]}


def test_without_staleness_it_is_the_sync_run(results: dict[str, Result]) -> None:
    sync, split = results["sync"], results["on_policy"]
    for name, rows in sync.rollouts.items():
        assert split.rollouts[name] == rows, name
    assert [versions(split, k) for k in range(1, STEPS + 1)] == [{k} for k in range(STEPS)]
    for ours, theirs in zip(steps_of(split), steps_of(sync), strict=True):
        same = {
            name for name in theirs if name.split("/")[0] in ("actor", "critic", "rollout_corr")
        }
        assert {n: ours[n] for n in same} == {n: theirs[n] for n in same}
        assert ours["fully_async/trajectory_staleness/max"] == 0
    assert [r["val/score"] for r in split.rows if "val/score" in r] == [
        r["val/score"] for r in sync.rows if "val/score" in r
    ]


def test_one_step_off_generates_with_the_weights_before_the_last_update(
    results: dict[str, Result],
) -> None:
    run, frozen = results["one_step"], results["frozen"]
    assert [versions(run, k) for k in range(1, STEPS + 1)] == [{0}, {0}, {1}, {2}]
    for step in (1, 2):  # frozen keeps the weights of version 0
        assert sampled(run, step) == sampled(frozen, step)
    assert sampled(run, 2) != sampled(results["sync"], 2)
    staleness = [row["fully_async/trajectory_staleness/mean"] for row in steps_of(run)]
    assert staleness == [0, 1, 1, 1]
    for row in steps_of(run)[1:]:  # the correction is of another policy
        assert row["rollout_corr/k3_kl"] > 1e-4
        assert 0 < row["trainer/idle_ratio"] < 1 and 0 < row["rollouter/idle_ratio"] < 1
        assert row["fully_async/count/dropped_stale_samples"] == 0
    assert any("val/score" in row for row in run.rows) and "summary.json" in run.files


def test_resume_generates_again_what_was_in_flight(results: dict[str, Result]) -> None:
    run, resumed = results["one_step"], results["resumed"]
    assert sorted(resumed.rollouts) == ["step_3", "step_4", "val_4"]
    for step in (3, 4):
        assert [r["index"] for r in resumed.rollouts[f"step_{step}"]] == [
            r["index"] for r in run.rollouts[f"step_{step}"]
        ]
    assert [versions(resumed, step) for step in (3, 4)] == [{2}, {2}]


def test_trajectories_of_several_turns_are_those_of_the_sync_run(
    results: dict[str, Result],
) -> None:
    sync, split = results["turns"], results["turns_on_policy"]
    assert any(len(row["turns"]) > 1 for row in sync.rollouts["step_1"])
    for name, rows in sync.rollouts.items():
        assert split.rollouts[name] == rows, name


def test_dynamic_sampling_takes_batches_in_their_order(results: dict[str, Result]) -> None:
    """Two of the eight prompts have signal, so every step takes two batches of four."""
    run = results["filtered"]
    assert [row["training/num_gen_batches"] for row in steps_of(run)] == [2] * STEPS
    assert max(row["fully_async/trajectory_staleness/max"] for row in steps_of(run)) <= 1
    assert [row["training/epoch"] for row in steps_of(run)] == [0, 1, 2, 3]


def test_async_is_within_the_bound(results: dict[str, Result]) -> None:
    run = results["async"]
    for step, row in enumerate(steps_of(run), 1):
        found = versions(run, step)
        assert max(found) <= step - 1 and min(found) >= step - 3
        assert row["fully_async/trajectory_staleness/max"] == step - 1 - min(found)
        rows = run.rollouts[f"step_{step}"]
        assert len(rows) == 16 and len({r["index"] for r in rows}) == 4
        assert row["critic/score/mean"] == pytest.approx(sum(r["reward"] for r in rows) / 16)


def test_two_engines_share_a_batch_as_two_replicas(tmp_path: Path) -> None:
    """Two engines for one trainer rank generate what two ranks do that also train."""
    shared = (
        "data.train_batch_size=5",
        "trainer.total_training_steps=1",
        FROZEN,  # else the last bits depend on the number of ranks that train
    )
    jobs = {
        "two": (*shared, "trainer.n_gpus_per_node=2"),
        "split": (*shared, *ONE_STEP, "rollout.n_gpus_per_node=2"),
    }
    two, split = run_named(tmp_path, base_of(tmp_path), jobs, num_ranks=3).values()
    assert len({row["weights_checksum"] for rows in two.rollouts.values() for row in rows}) == 1
    assert two.rollouts == split.rollouts and len(two.rollouts["step_1"]) == 20


def test_a_signal_to_an_engine_rank_stops_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "stopping.py").write_text(STOPPING)
    path = f"reward.custom_reward_function.path={tmp_path}/stopping.py"
    job = overrides_of(tmp_path, base_of(tmp_path), "run", (*ONE_STEP, path, "data.val_files=null"))
    stopped, restarted = run_overlapped(tmp_path, [job, job], num_ranks=2)
    assert stopped.refused == f"exit code {EXIT_STOPPED}"
    assert len(stopped.rows) >= 1 and "final/complete.json" not in stopped.files
    assert "global_step_1/complete.json" in stopped.files
    # The second start is one by torchrun's agent: it resumes, although resume_mode is disable.
    assert steps_of(restarted)[: len(steps_of(stopped))] == steps_of(stopped)
    assert len(steps_of(restarted)) > len(steps_of(stopped))
    assert not any(file.startswith("previous-") for file in restarted.files)


def test_a_killed_engine_ends_the_run_with_its_name(tmp_path: Path) -> None:
    settings = {
        "rollout.name": "hf",
        "rollout.n_gpus_per_node": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.mode": "one_step_off",
        "trainer.total_training_steps": 10_000,
    }
    assert_named_when_killed(tmp_path, settings, "engine 0")
