"""A rank without heartbeat has failed if it ended or is stopped, not if it gets no time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from hybridengine.run.activity import machine_id
from hybridengine.run.failures import CollectiveGuard, RankReport
from hybridengine.run.monitor import RankMonitor


@pytest.fixture
def guard() -> CollectiveGuard:
    """Of rank 0 of two; rank 1 never starts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    return CollectiveGuard(0, 2, store)


@pytest.fixture
def monitor(guard: CollectiveGuard) -> Iterator[RankMonitor]:
    monitor = RankMonitor(guard, timeout_s=300.0)
    monitor.close()  # the tests judge by hand
    yield monitor


def beat(guard: CollectiveGuard, monitor: RankMonitor, heartbeat: str) -> None:
    guard.set("heartbeat/1", heartbeat)
    monitor.read_heartbeats()


def text(report: RankReport | None) -> str:
    assert report is not None
    return str(report)


def test_a_slow_start_is_waited_for_as_long_as_a_collective(monitor: RankMonitor) -> None:
    assert monitor.judge(1, 200.0) is None
    assert text(monitor.judge(1, 301.0)) == "rank 1 has not started within 300 s"


def test_a_process_on_this_machine_is_judged_by_its_state(
    guard: CollectiveGuard, monitor: RankMonitor
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    guard.set("process/1", f"{machine_id()}|{process.pid}")
    beat(guard, monitor, "phase 'gen' of step 3|7")
    try:
        assert monitor.judge(1, 200.0) is None, "it runs: starved, not stalled"
        assert "sent no heartbeat for 301 s" in text(monitor.judge(1, 301.0))
        process.send_signal(signal.SIGSTOP)
        while guard.process_state(1) != "stopped":
            time.sleep(0.01)
        assert monitor.judge(1, 5.0) is None
        assert "is stopped (SIGSTOP)" in text(monitor.judge(1, 20.0))
    finally:
        process.kill()
        os.waitpid(process.pid, 0)
    assert monitor.judge(1, 1.0) is None
    assert text(monitor.judge(1, 4.0)) == "rank 1 has ended without finishing the run"
    guard.set("finished/1", "1")
    monitor.read_heartbeats()
    assert monitor.judge(1, 1000.0) is None, "it has finished, and may end"


def test_a_process_on_another_machine_has_more_time_while_it_starts(
    guard: CollectiveGuard, monitor: RankMonitor
) -> None:
    guard.set("process/1", "another machine|1")
    beat(guard, monitor, "phase 'load_model' of step 0|7")
    assert monitor.judge(1, 299.0) is None
    beat(guard, monitor, "phase 'gen' of step 1|8")
    assert monitor.judge(1, 30.0) is None
    assert "sent no heartbeat for 70 s" in text(monitor.judge(1, 70.0))
