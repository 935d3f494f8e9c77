"""Stop signals to the launcher and to ranks, also while the main thread is in native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hybridengine.run.errors import EXIT_STOPPED
from hybridengine.run.launch import describe_failure, only_stopped
from hybridengine.run.monitor import EXIT_RANK_FAILED
from tests.ranks import Ranks

RANK = """
import os, sys, time, threading
from hybridengine.run import session

session.SAME_REQUEST_S = 600.0
signals = session.StopSignals()
signals.can_wait = sys.argv[1] == "True"
receive = signals.receive
def receive_and_tell(number):
    receive(number)
    print("requested", signals.requested, flush=True)
signals.receive = receive_and_tell
signals.open()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(600)
    os._exit(0)
def let_time_pass():
    sys.stdin.readline()
    session.SAME_REQUEST_S = 0.0
    print("later", flush=True)
threading.Thread(target=let_time_pass).start()
lock = threading.Lock()
lock.acquire()
lock.acquire()  # no Python handler runs in here
"""


@pytest.mark.slow
@pytest.mark.parametrize("can_wait", [True, False])
def test_the_first_signal_requests_a_stop_the_second_ends(can_wait: bool) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(can_wait)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert rank.stdin is not None and rank.stdout is not None
    child = int(rank.stdout.readline())
    try:
        os.kill(child, signal.SIGTERM)  # ends the forked child; its parent gets nothing
        time.sleep(0.5)
        assert rank.poll() is None
        rank.send_signal(signal.SIGTERM)
        if can_wait:
            assert rank.stdout.readline() == "requested 15\n"
            rank.send_signal(signal.SIGTERM)  # forwarded by torchrun, say
            assert rank.stdout.readline() == "requested 15\n", "it goes on"
            rank.stdin.write("\n")
            rank.stdin.flush()
            assert rank.stdout.readline() == "later\n"
            rank.send_signal(signal.SIGINT)
        assert rank.wait(30) == EXIT_STOPPED
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        rank.kill()
        rank.wait()


def first_step(rank: int, world_size: int, folder: Path, sent: signal.Signals) -> int:
    """Rank 0 is in its first step, and waits for rank 1, which sends itself a signal before it."""
    import torch
    import torch.distributed as dist

    from hybridengine.run import monitor
    from hybridengine.run import rank as rank_life
    from hybridengine.run.session import Session

    dist.barrier()
    dist.destroy_process_group()
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"record_{rank}.json")
    monitor.STOPPED_S = 1.0  # not 10

    def main(run: Session) -> None:
        dist.barrier()
        if rank == 0:
            run.signals.can_wait = True
            (folder / "waits").touch()
            dist.all_reduce(torch.ones(1))
        while not (folder / "waits").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), sent)
        time.sleep(600)

    return rank_life.run_rank(main, folder, timeout_s=240.0)


def failures_of(folder: Path, sent: signal.Signals) -> dict[int, ProcessFailure]:
    """Return how the ranks of `first_step` ended, as the launcher sees it."""
    with Ranks(first_step, 2, folder, sent) as ranks:
        for process in ranks.processes:
            process.join(120)
        return {
            k: ProcessFailure(k, p.pid or 0, p.exitcode or 0, str(folder / f"record_{k}.json"))
            for k, p in enumerate(ranks.processes)
        }


@pytest.mark.multirank
def test_a_signal_while_the_ranks_reach_the_first_step_is_a_stop(tmp_path: Path) -> None:
    failures = failures_of(tmp_path, signal.SIGTERM)
    codes = [failure.exitcode for failure in failures.values()]
    assert codes == [EXIT_RANK_FAILED, EXIT_STOPPED]
    assert only_stopped(failures)


@pytest.mark.multirank
def test_a_rank_that_is_stopped_ends_with_the_run(tmp_path: Path) -> None:
    """It does not wait for SIGCONT, nor the launcher for it."""
    failures = failures_of(tmp_path, signal.SIGSTOP)
    codes = [failure.exitcode for failure in failures.values()]
    assert codes == [EXIT_RANK_FAILED, -signal.SIGKILL]
    assert not only_stopped(failures)
    assert "rank 1" in (told := describe_failure(failures, {})) and "(SIGSTOP)" in told


IMPORTING = """
import pathlib, time
pathlib.Path({folder!r}, "imports").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_launcher_imports_is_a_stop(
    tmp_path: Path, sent: signal.Signals
) -> None:
    (tmp_path / "torch.py").write_text(IMPORTING.format(folder=str(tmp_path)))
    settings = ["model.path=m", "data.train_files=f", "trainer.default_local_dir=run"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "hybridengine", "sft", *settings],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (tmp_path / "imports").exists():
            assert launcher.poll() is None, launcher.communicate()
            time.sleep(0.01)
        launcher.send_signal(sent)
        output = launcher.communicate(timeout=60)[1]
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == EXIT_STOPPED, output
    told = f"stopped by {sent.name} before the start; run the same command again"
    assert output.splitlines() == [told]
