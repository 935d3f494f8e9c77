"""Starting ranks: the description of a failure, and that it blames the right rank."""

import os
import signal
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hybridengine.run import launch
from hybridengine.run.errors import EXIT_STOPPED, EXIT_USER_ERROR
from hybridengine.run.failures import RankReport
from hybridengine.run.launch import describe_failure, only_stopped
from hybridengine.run.monitor import EXIT_RANK_FAILED, write_error_record
from hybridengine.run.session import PhaseStatus, clear_status, read_status
from tests.train.toy import start_toy, toy_job


@pytest.fixture
def failure(tmp_path, monkeypatch):
    """A rank's failure as torch's launcher sees it, with the error record that the rank wrote."""

    def build(exitcode, reason=None, cause=None):
        file = tmp_path / f"error_{time.monotonic()}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        if reason is not None:
            write_error_record(reason, cause)
        return ProcessFailure(0, 123, exitcode, str(file))

    return build


def test_a_killed_rank_is_named_with_its_phase(tmp_path, failure):
    PhaseStatus(tmp_path, 1).enter("gen", 3)
    pid = os.getpid()
    failures = {0: failure(1), 1: failure(-signal.SIGKILL), 2: failure(-signal.SIGTERM)}
    assert describe_failure(failures, read_status(tmp_path)) == (
        f"rank 1 (pid {pid}) was killed by SIGKILL in phase 'gen' of step 3; "
        "the other ranks were stopped."
    )


def test_a_stopped_rank_is_not_called_killed_because_the_launcher_ended_it(tmp_path, failure):
    PhaseStatus(tmp_path, 1).enter("gen", 3)
    stopped = RankReport(1, "stopped", "is stopped (SIGSTOP) for 11 s")
    failures = {0: failure(EXIT_RANK_FAILED, "…", stopped), 1: failure(-signal.SIGKILL)}
    assert describe_failure(failures, read_status(tmp_path)) == (
        f"rank 1 (pid {os.getpid()}) is stopped (SIGSTOP) for 11 s in phase 'gen' of step 3; "
        "the other ranks were stopped."
    )


def test_the_cause_is_blamed_not_its_victim(tmp_path, failure):
    for rank, phase in enumerate(["gen", "reward"]):
        PhaseStatus(tmp_path, rank).enter(phase, 2)
    failures = {
        0: failure(EXIT_RANK_FAILED, "…", RankReport(1, "failed", "failed in …")),
        1: failure(-signal.SIGTERM, "RewardError: no number"),
        2: failure(1, "ValueError: later"),
    }
    assert describe_failure(failures, read_status(tmp_path)) == (
        f"rank 1 (pid {os.getpid()}) failed in phase 'reward' of step 2: RewardError: no number; "
        "the other ranks were stopped."
    )


def test_a_rank_without_error_record(tmp_path, failure):
    failures = {0: failure(EXIT_RANK_FAILED), 1: failure(3)}
    assert describe_failure(failures, read_status(tmp_path)) == (
        "rank 1 (pid 123) ended with exit code 3 while starting; the other ranks were stopped."
    )


def test_a_rank_that_ends_with_exit_code_0_is_blamed(tmp_path, failure):
    for rank in (0, 1):
        PhaseStatus(tmp_path, rank).enter("adv", 2)
    where = f"rank 1 (pid {os.getpid()}) ended without finishing the run (exit code 0) in phase"
    cause = RankReport(1, "ended", "has ended without finishing the run")
    message = describe_failure({0: failure(EXIT_RANK_FAILED, "…", cause)}, read_status(tmp_path))
    assert message == f"{where} 'adv' of step 2; the other ranks were stopped."
    (tmp_path / ".status" / "rank_0.json").unlink()
    assert describe_failure({}, read_status(tmp_path)) == f"{where} 'adv' of step 2."


def test_a_stop_is_told_from_failures_that_end_in_the_same_codes(failure):
    stopped, waits = failure(EXIT_STOPPED), RankReport(1, "ended", "has ended")
    assert only_stopped({}) and only_stopped({1: stopped})
    assert only_stopped({0: failure(EXIT_RANK_FAILED, "…", waits), 1: stopped})
    silent = RankReport(1, "running", "has sent no heartbeat for 301 s")  # ended by the launcher
    for causes in (
        {0: failure(EXIT_RANK_FAILED, "…", silent), 1: stopped},
        {0: failure(EXIT_RANK_FAILED, "…", waits), 1: failure(-signal.SIGKILL)},
        {0: failure(EXIT_RANK_FAILED, "…", waits)},
        {0: failure(1, "ValueError: x"), 1: stopped},
        {0: failure(-signal.SIGTERM, "RewardError: no number"), 1: stopped},
    ):
        assert not only_stopped(causes)


def test_what_cannot_be_used_has_its_own_exit_code(tmp_path, failure):
    """All checkpoints are damaged, say: a rank reads all of their bytes, the launcher does not."""
    failures = {k: failure(EXIT_USER_ERROR, "CheckpointError: damaged") for k in (0, 1)}
    for rank in (0, 1):
        PhaseStatus(tmp_path, rank).enter("resume", 0)
    assert launch.exit_code_of(failures, read_status(tmp_path)) == EXIT_USER_ERROR
    victim = failure(EXIT_RANK_FAILED, "…", RankReport(0, "failed", "failed in …"))
    assert launch.exit_code_of({**failures, 1: victim}, read_status(tmp_path)) == EXIT_USER_ERROR
    assert launch.exit_code_of({0: failure(1, "OSError: x")}, read_status(tmp_path)) == 1
    PhaseStatus(tmp_path, 0).enter("reward", 3)
    assert launch.exit_code_of(failures, read_status(tmp_path)) == 1, "a rank failed in its step"


def test_status_is_what_each_rank_last_entered(tmp_path):
    assert read_status(tmp_path) == {}
    one, other = PhaseStatus(tmp_path, 0), PhaseStatus(tmp_path, 1)
    one.enter("gen", 3)
    other.enter("gen", 3)
    one.enter("reward", 3)
    other.end("finished")
    status = read_status(tmp_path)
    assert (status[0].phase, status[0].step, status[0].pid) == ("reward", 3, os.getpid())
    assert (status[1].phase, status[0].end, status[1].end) == ("gen", "", "finished")
    clear_status(tmp_path)
    assert read_status(tmp_path) == {}


@pytest.mark.exhaustive
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
    with start_toy(job) as run:
        output = "".join(run.communicate(timeout=300))
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
    with start_toy(toy_job(tmp_path, **settings)) as run:
        deadline = time.monotonic() + 300
        while len(read_status(tmp_path / "run")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(run.pid, signal.SIGINT)
        output = "".join(run.communicate(timeout=240))
    assert run.returncode == EXIT_STOPPED, output
    told = "stopped by SIGINT: no checkpoint was saved; the same command starts anew"
    assert output.splitlines()[-1] == told, output
    assert "Traceback" not in output and "failed" not in output
    for status in read_status(tmp_path / "run").values():
        with pytest.raises(ProcessLookupError):
            os.kill(status.pid, 0)
