"""A store or a disk that stops answering does not keep a rank for ever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from hybridengine import storage, writes
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


@pytest.mark.slow
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


STUCK = """
import time
from pathlib import Path
from hybridengine.runtime.monitor import RankMonitor, connect_guard
from hybridengine.writes import writing_to

guard = connect_guard(0, 1)
guard.phase = "phase 'export' of step 3"
monitor = RankMonitor(guard, timeout_s=2.0)
with writing_to(Path("final")):
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_rank_ends_when_a_write_makes_no_progress(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = subprocess.run(
        [sys.executable, "-c", STUCK],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)},
        timeout=240,
    )
    assert rank.returncode == EXIT_RANK_FAILED
    reason = "writing 'final' has made no progress for 2 s (trainer.timeout_s)"
    assert f"rank 0, in phase 'export' of step 3: {reason}" in rank.stderr, rank.stderr


def test_progress_is_bytes_or_what_the_writer_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(writes.time, "monotonic", lambda: now)
    write = writes.Write(tmp_path / "folder")
    seen = []
    for change in (None, "file", None, "longer", "noted", "read", None):
        now += 1
        if change == "file":
            (tmp_path / "folder").mkdir()
            (tmp_path / "folder" / "part").write_bytes(b"1")
        elif change == "longer":
            (tmp_path / "folder" / "part").write_bytes(b"12")
        elif change == "noted":
            writes.note_progress()
        elif change == "read":
            storage.file_records(tmp_path / "folder")
        write.observe()
        seen.append(write.progressed)
    assert seen == [1, 2, 2, 4, 5, 6, 6]
