"""Starting ranks: what the parent says of a failure, and that it blames the right rank."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from hybridengine.runtime import EXIT_PEER_LOST, EXIT_STOPPED
from hybridengine.runtime.launch import _describe
from hybridengine.tracking import PhaseStatus, read_status
from tests.trainer.toy import start_toy, toy_job


def failure(exitcode: int, timestamp: int = 0, pid: int = 123):
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, pid=pid)


def test_a_killed_rank_is_named_with_its_phase(tmp_path):
    PhaseStatus(tmp_path, 1).enter("gen", 3)
    pid = os.getpid()
    failures = {0: failure(1), 1: failure(-signal.SIGKILL), 2: failure(-signal.SIGTERM)}
    assert _describe(failures, read_status(tmp_path)) == (
        f"rank 1 (pid {pid}) was killed by SIGKILL in phase 'gen' of step 3; "
        "the other ranks were stopped."
    )


def test_the_cause_is_blamed_not_its_victim(tmp_path):
    for rank in (0, 1):
        PhaseStatus(tmp_path, rank).enter("gen", 2)
    culprit = PhaseStatus(tmp_path, 1)
    culprit.enter("reward", 2)
    culprit.fail("RewardError: no number")
    # The launcher saw rank 0 go first, and stopped rank 1 before its exit code was there.
    message = _describe({0: failure(EXIT_PEER_LOST)}, read_status(tmp_path))
    assert message == (
        f"rank 1 (pid {os.getpid()}) failed in phase 'reward' of step 2: RewardError: no number; "
        "the other ranks were stopped."
    )


def test_a_rank_that_says_nothing(tmp_path):
    failures = {0: failure(EXIT_PEER_LOST), 1: failure(3)}
    assert _describe(failures, read_status(tmp_path)) == (
        "rank 1 (pid 123) ended with exit code 3 while starting; the other ranks were stopped."
    )


def test_a_rank_that_ends_with_exit_code_0_is_blamed(tmp_path):
    for rank in (0, 1):
        PhaseStatus(tmp_path, rank).enter("adv", 2)
    PhaseStatus(tmp_path, 0).lose(1)
    where = f"rank 1 (pid {os.getpid()}) ended without finishing the run (exit code 0) in phase"
    message = _describe({0: failure(EXIT_PEER_LOST)}, read_status(tmp_path))
    assert message == f"{where} 'adv' of step 2; the other ranks were stopped."
    (tmp_path / ".status" / "rank_0.json").unlink()
    assert _describe({}, read_status(tmp_path)) == f"{where} 'adv' of step 2."


@pytest.mark.multirank
def test_a_reward_that_ends_its_process_in_mid_run(tmp_path):
    """The run fails and names the sample; it does not end early as if all were well."""
    job = toy_job(tmp_path, **{"rollout.name": "hf", "trainer.total_training_steps": 3})
    (tmp_path / "reward.py").write_text(
        "import os\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if os.environ.get('RANK') == '1' and solution_str:\n"
        "        os._exit(0)\n"
        "    return 0.5\n"
    )
    run = start_toy(job)
    try:
        output, _ = run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 1, output
    assert "compute_score ended its process with exit code 0 at " in output
    assert f"{tmp_path}/reward.py:2; prompt 'w" in output
    last = output.splitlines()[-1]
    assert last.startswith("error: rank 1 (pid "), output
    assert "failed in phase 'reward' of step 1: RewardError: reward function compute_score" in last
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.multirank
def test_ctrl_c_before_the_first_step_ends_every_rank_at_once(tmp_path):
    settings = {"rollout.name": "hf", "trainer.total_training_steps": 10_000}
    run = start_toy(toy_job(tmp_path, **settings))
    try:
        deadline = time.monotonic() + 120
        while len(read_status(tmp_path / "run")) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(run.pid, signal.SIGINT)
        output, _ = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == EXIT_STOPPED, output
    told = "stopped by SIGINT: no checkpoint was saved; the same command starts anew"
    assert output.splitlines()[-1] == told, output
    assert "Traceback" not in output and "failed" not in output
    for status in read_status(tmp_path / "run").values():
        with pytest.raises(ProcessLookupError):
            os.kill(status.pid, 0)
