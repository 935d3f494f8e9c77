"""A store that stops answering, as behind a stalled link, does not keep a rank for ever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from hybridengine.runtime.monitor import EXIT_RANK_FAILED

RANK = """
import time
from hybridengine.runtime.monitor import RankMonitor, connect_guard

guard = connect_guard(0, 1)
guard.phase = "phase 'gen' of step 3"
monitor = RankMonitor(guard, timeout_s=2.0)
print("started", flush=True)
time.sleep(600)
"""


class Proxy:
    """Forwards connections to a port until `stalled` is set; then their bytes stay where they are.

    Attributes:
        port: to connect to.
    """

    def __init__(self, port: int) -> None:
        self.stalled, self._target = threading.Event(), port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, destination: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.stalled.is_set():
                    return
                destination.sendall(data)


def test_a_rank_ends_when_its_store_is_silent_and_its_log_broken(tmp_path: Path) -> None:
    """One rank can report why it ends; the other one has no log and no place for a record."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    proxy = Proxy(server.port)
    record = tmp_path / "record.json"
    nowhere, broken = os.pipe()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(proxy.port)}
            | {"TORCHELASTIC_ERROR_FILE": str(file)},
        )
        for log, file in ((subprocess.PIPE, record), (broken, tmp_path / "file" / "record.json"))
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "started\n"
        (tmp_path / "file").touch()
        os.close(nowhere)
        os.close(broken)
        proxy.stalled.set()
        for rank in ranks:
            assert rank.wait(60) == EXIT_RANK_FAILED
    finally:
        for rank in ranks:
            rank.kill()
    reason = "the rendezvous store, on rank 0's node, has not answered for 2 s (trainer.timeout_s)"
    assert ranks[0].stderr is not None
    log = ranks[0].stderr.read()
    assert f"rank 0, in phase 'gen' of step 3: {reason}" in log, log
    assert json.loads(record.read_text())["message"]["message"] == reason
