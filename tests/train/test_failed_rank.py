"""A failed or stalled rank ends the run soon, with its number and its phase."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.train.processes import START_S, WITHIN_S, pid_of_training_rank
from tests.train.toy import start_toy, toy_job

pytestmark = pytest.mark.multirank

# Limits collectives from the first step on: ranks may start at times that are further apart.
SHORT_TIMEOUT = """
from datetime import timedelta
import torch
from torch.distributed import distributed_c10d
from hybridengine.train import rollout_source
gather = rollout_source.gather_rollouts
def gather_within_4_s(*args):
    group = distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert group.options._timeout == timedelta(seconds=555), group.options._timeout
    distributed_c10d._set_pg_timeout(timedelta(seconds=4))
    return gather(*args)
rollout_source.gather_rollouts = gather_within_4_s
"""
STALLING_REWARD = """
import os, time
from pathlib import Path
def compute_score(data_source, solution_str, ground_truth, extra_info):
    stalls = Path(__file__).with_name("stalls")
    while os.environ.get("RANK") == "1" and solution_str:
        stalls.touch()
        time.sleep(0.01)
    while os.environ.get("RANK") == "0" and solution_str and not stalls.exists():
        time.sleep(0.01)
    return 0.5
"""


@pytest.mark.parametrize(
    "sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)]
)
def test_failed_rank_is_named_with_its_phase(tmp_path: Path, sent: signal.Signals) -> None:
    with start_toy(
        toy_job(tmp_path, **{"rollout.name": "hf", "trainer.total_training_steps": 10_000})
    ) as run:
        pid = pid_of_training_rank(tmp_path / "run", rank=1)
        os.kill(pid, sent)
        output = "".join(run.communicate(timeout=WITHIN_S))
    assert run.returncode not in (0, None)
    last = output.splitlines()[-1]
    how = "was killed by SIGKILL" if sent == signal.SIGKILL else "is stopped (SIGSTOP) for "
    assert last.startswith(f"error: rank 1 (pid {pid}) {how}"), output
    assert "in phase '" in last and "of step" in last


def test_a_stall_ends_with_rank_phase_and_stacks(tmp_path: Path) -> None:
    """Rank 1 waits for its reward; rank 0 waits for rank 1 in the next collective."""
    settings = {
        "rollout.name": "hf",
        "reward.timeout_s": 500,
        "trainer.timeout_s": 555,
        "model.external_lib": tmp_path / "mine.py",
    }
    job = toy_job(tmp_path, **settings)
    (tmp_path / "mine.py").write_text(SHORT_TIMEOUT)
    (tmp_path / "reward.py").write_text(STALLING_REWARD)
    with start_toy(job) as run:
        output = "".join(run.communicate(timeout=START_S))
    assert run.returncode == 1, output
    last = output.splitlines()[-1]
    assert last.startswith("error: rank 0 (pid "), output
    assert "in phase 'gather_rollouts' of step 1" in last
    assert "meanwhile rank 1 is in phase 'reward' of step 1" in last
    assert "extras/rewards/workers.py:" in last
    stacks = output.index("rank 1 stalls in phase 'reward' of step 1; its stacks:")
    assert "rewards/workers.py" in output[stacks:]


@pytest.mark.parametrize(
    ("ranks", "call"),
    [
        pytest.param(1, "os._exit(0)", marks=pytest.mark.exhaustive),
        (2, "os._exit(0)"),
        (1, "exit(0)"),
    ],
)
def test_exit_code_0_in_the_middle_is_a_failure(tmp_path: Path, ranks: int, call: str) -> None:
    """User code ends the process of the last rank in the middle of a step."""
    settings = {
        "rollout.name": "hf",
        "trainer.n_gpus_per_node": ranks,
        "algorithm.adv_estimator": "ending",
        "model.external_lib": tmp_path / "mine.py",
    }
    job = toy_job(tmp_path, **settings)
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "from sys import exit\n"
        "from hybridengine.train.algorithms import advantages, register_estimator\n"
        "@register_estimator('ending')\n"
        "def ending(responses, options):\n"
        f"    if os.environ['RANK'] == '{ranks - 1}':\n"
        f"        {call}\n"
        "    return advantages('grpo', responses, options)\n"
    )
    with start_toy(job) as run:
        output = "".join(run.communicate(timeout=START_S))
    assert run.returncode == 1, output
    last = output.splitlines()[-1]
    assert last.startswith(f"error: rank {ranks - 1} (pid "), output
    assert "in phase 'adv' of step 1" in last
    how = "sys.exit(0) was called" if call == "exit(0)" else "without finishing the run"
    assert how in last, output
    assert not (tmp_path / "run" / "final").exists()
