"""Stop signals of one rank, also while its main thread is in native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from hybridengine.runtime.session import EXIT_STOPPED

RANK = """
import os, sys, time, threading
from hybridengine.runtime import session

session._SAME_REQUEST_S = 600.0
signals = session.StopSignals()
signals.can_wait = sys.argv[1] == "True"
receive = signals._receive
def receive_and_tell(number):
    receive(number)
    print("requested", signals.requested, flush=True)
signals._receive = receive_and_tell
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(600)
    os._exit(0)
def let_time_pass():
    sys.stdin.readline()
    session._SAME_REQUEST_S = 0.0
    print("later", flush=True)
threading.Thread(target=let_time_pass).start()
lock = threading.Lock()
lock.acquire()
lock.acquire()  # no Python handler runs in here
"""


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
