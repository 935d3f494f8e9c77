"""Which silent rank counts as lost: one that is gone or stopped, not one that gets no time."""

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

from hybridengine.runtime import peers
from hybridengine.runtime.peers import PeerWatch, _Peer


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerWatch]:
    """Of rank 0 of two, whose peer never starts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    watch = PeerWatch(0, 2, timeout_s=300.0)
    yield watch
    watch.close()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_a_slow_start_is_waited_for_as_long_as_a_collective(watch: PeerWatch) -> None:
    peer = _Peer()
    assert watch._why_lost(peer, 200.0) == ""
    assert watch._why_lost(peer, 301.0) == "has not started within 300 s"


def test_a_process_on_this_machine_is_judged_by_its_state(watch: PeerWatch) -> None:
    process = sleeper()
    peer = _Peer("phase 'gen' of step 3|7", process=(peers._machine(), process.pid))
    try:
        assert watch._why_lost(peer, 200.0) == "", "it runs: starved, not lost"
        assert "silent for 301 s" in watch._why_lost(peer, 301.0)
        process.send_signal(signal.SIGSTOP)
        while peer.state() != "stopped":
            time.sleep(0.01)
        assert watch._why_lost(peer, 5.0) == ""
        assert "is stopped (SIGSTOP)" in watch._why_lost(peer, 20.0)
    finally:
        process.kill()
        os.waitpid(process.pid, 0)
    assert watch._why_lost(peer, 1.0) == ""
    assert watch._why_lost(peer, 4.0) == "has ended without finishing the run"
    peer.beat = "done|8"
    assert watch._why_lost(peer, 1000.0) == "", "it has finished, and may end"


def test_a_process_elsewhere_has_more_time_while_it_starts(watch: PeerWatch) -> None:
    peer = _Peer("phase 'load_model' of step 0|7", process=("another machine", 1))
    assert watch._why_lost(peer, 299.0) == ""
    peer.beat = "phase 'gen' of step 1|8"
    assert watch._why_lost(peer, 30.0) == ""
    assert "silent for 70 s" in watch._why_lost(peer, 70.0)
