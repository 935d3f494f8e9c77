"""A store or a disk that stops answering does not keep a rank for ever."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from hybridengine.run import storage
from hybridengine.run.monitor import EXIT_RANK_FAILED
from tests.ranks import Ranks

PHASE = "phase 'gen' of step 3"


def run_rank(rank: int, world_size: int, folder: Path, port: int, has_log: bool) -> None:
    """One rank, whose store is at `port`. has_log: whether it can write its log and its record."""
    from hybridengine.run.failures import CollectiveGuard
    from hybridengine.run.monitor import RankMonitor
    from hybridengine.run.rank import connect_store

    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / "record.json")
    if has_log:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    else:
        nowhere, log = os.pipe()
        os.close(nowhere)
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / "started" / "record.json")
    os.dup2(log, 2)
    guard = CollectiveGuard(0, 1, connect_store(timeout_s=30))
    guard.phase = PHASE
    monitor = RankMonitor(guard, timeout_s=2.0)  # noqa: F841, runs while it is there
    (folder / "started").touch()
    time.sleep(600)


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


@pytest.mark.multirank
def test_a_rank_ends_when_its_store_is_silent_and_its_log_broken(tmp_path: Path) -> None:
    """One rank can report why it ends; the other one has no log and no place for a record."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    proxy = Proxy(server.port)
    folders = [tmp_path / "log", tmp_path / "no_log"]
    with ExitStack() as stack:
        ranks = []
        for folder in folders:
            folder.mkdir()
            arguments = (folder, proxy.port, folder == folders[0])
            ranks.append(stack.enter_context(Ranks(run_rank, 1, *arguments)).processes[0])
        while not all((folder / "started").exists() for folder in folders):
            assert all(rank.is_alive() for rank in ranks)
            time.sleep(0.02)
        proxy.stalled.set()
        for rank in ranks:
            rank.join(60)
            assert rank.exitcode == EXIT_RANK_FAILED
    reason = "the rendezvous store, on rank 0's node, has not answered for 2 s (trainer.timeout_s)"
    log = (folders[0] / "log").read_text()
    assert f"rank 0, in {PHASE}: {reason}" in log, log
    assert json.loads((folders[0] / "record.json").read_text())["message"]["message"] == reason


def write_without_progress(rank: int, world_size: int, folder: Path) -> None:
    from hybridengine.run.failures import CollectiveGuard
    from hybridengine.run.monitor import RankMonitor
    from hybridengine.run.rank import connect_store

    os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT), 2)
    guard = CollectiveGuard(0, 1, connect_store(timeout_s=30))
    guard.phase = "phase 'export' of step 3"
    monitor = RankMonitor(guard, timeout_s=2.0)  # noqa: F841, runs while it is there
    with storage.writing_to(folder / "final"):
        time.sleep(600)


@pytest.mark.multirank
def test_a_rank_ends_when_a_write_makes_no_progress(tmp_path: Path) -> None:
    with Ranks(write_without_progress, 1, tmp_path) as ranks:
        [rank] = ranks.processes
        rank.join(240)
        assert rank.exitcode == EXIT_RANK_FAILED
    log, final = (tmp_path / "log").read_text(), str(tmp_path / "final")
    reason = f"writing {final!r} has made no progress for 2 s (trainer.timeout_s)"
    assert f"rank 0, in phase 'export' of step 3: {reason}" in log, log


def test_progress_is_bytes_or_what_the_writer_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(storage.time, "monotonic", lambda: now)
    write = storage.Write(tmp_path / "folder")
    seen = []
    for change in (None, "file", None, "longer", "noted", "read", None):
        now += 1
        if change == "file":
            (tmp_path / "folder").mkdir()
            (tmp_path / "folder" / "part").write_bytes(b"1")
        elif change == "longer":
            (tmp_path / "folder" / "part").write_bytes(b"12")
        elif change == "noted":
            storage.note_progress()
        elif change == "read":
            storage.file_records(tmp_path / "folder")
        write.observe()
        seen.append(write.progressed)
    assert seen == [1, 2, 2, 4, 5, 6, 6]
