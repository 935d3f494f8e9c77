"""torchrun's elastic agent restarts a job after the loss of a rank: it resumes by itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.train.checkpoint.runs import metrics
from tests.train.in_process import run_jobs, small_job

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.exhaustive,
]  # siblings: test_restarts, test_overlap

STEPS, LIMIT_S = 4, 240

# Scores are those of the job, computed in child processes of the ranks that generate. The first
# one that finds two checkpoints kills its rank.
KILLING = """
from pathlib import Path
import psutil
from reward import compute_score as score

RUN = Path({run!r})

def compute_score(data_source, solution_str, ground_truth, extra_info):
    saved = sorted(RUN.glob("global_step_*/complete.json"))
    if len(saved) >= 2:
        try:
            with (RUN / "killed").open("x") as file:
                file.write(str(len(saved)))
        except FileExistsError:
            pass
        else:
            psutil.Process().parent().parent().kill()  # rank, its guard, this worker
    return score(data_source, solution_str, ground_truth, extra_info)
"""

ENGINE_RANK = ("trainer.mode=one_step_off", "trainer.staleness=0", "rollout.n_gpus_per_node=1")


def agent(num_ranks: int, *options: str) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    return [*torchrun, "--max-restarts", "1", *options, "-m", "hybridengine", "grpo"]


def run_to_the_end(folder: Path, agents: list[list[str]], overrides: list[str]) -> list[str]:
    """Run the same job under every agent; return their outputs."""
    (folder / "config.yaml").write_text("")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(folder)}
    runs = [
        subprocess.Popen(
            [*command, str(folder / "config.yaml"), *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=environment,
        )
        for command in agents
    ]
    try:
        outputs = [run.communicate(timeout=LIMIT_S)[0] for run in runs]
    finally:
        for run in runs:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert all(run.returncode == 0 for run in runs), "\n".join(outputs)
    return outputs


def two_nodes() -> list[list[str]]:
    """Two agents that meet at one of them; each counts restarts for itself."""
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    return [agent(1, "--nnodes", "2", "--local-addr", "127.0.0.1", *meeting)] * 2


@pytest.mark.parametrize(
    ("agents", "ranks"),
    [
        ([agent(2, "--standalone")], ENGINE_RANK),
        ([agent(2, "--standalone")], ("trainer.n_gpus_per_node=2",)),
        (two_nodes(), ("trainer.nnodes=2",)),
    ],
    ids=["engine rank", "colocated", "two nodes"],
)
def test_a_killed_rank_costs_the_running_step(
    tmp_path: Path, agents: list[list[str]], ranks: tuple[str, ...]
) -> None:
    base = small_job(tmp_path)
    run = tmp_path / "restarted"
    (tmp_path / "killing.py").write_text(KILLING.format(run=str(run)))
    shared = [f"trainer.total_training_steps={STEPS}"]
    world_size = 1 if ranks == ENGINE_RANK else 2
    reference = [*base, *shared, f"trainer.n_gpus_per_node={world_size}"]
    [uninterrupted] = run_jobs(tmp_path, [reference], world_size)
    assert not uninterrupted.refused
    overrides = {
        "trainer.save_freq": 1,
        "trainer.resume_mode": "disable",  # of the first start: a restart resumes all the same
        "trainer.logger": "[jsonl,console]",
        "trainer.default_local_dir": run,
        "reward.custom_reward_function.path": tmp_path / "killing.py",
    }
    pairs = dict(o.split("=", 1) for o in (*base, *shared, *ranks)) | overrides
    outputs = run_to_the_end(tmp_path, agents, [f"{k}={v}" for k, v in pairs.items()])
    resumed = re.findall(r"resumed after step (\d)", "".join(outputs))
    assert resumed and int(resumed[0]) >= int((run / "killed").read_text()), outputs
    assert not list(run.glob("previous-*"))
    steps = [row["step"] for row in metrics(run) if "actor/pg_loss" in row]
    assert steps == [*range(1, STEPS + 1)]
    for name, rows in uninterrupted.rollouts.items():
        written = (run / "rollouts" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(row) for row in written] == rows, name
    theirs = (tmp_path / "run" / "final" / "model.safetensors").read_bytes()
    assert (run / "final" / "model.safetensors").read_bytes() == theirs
