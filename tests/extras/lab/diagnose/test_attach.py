"""`doctor --attach`: who waits for whom in a sync that hangs, and what differs in the engine."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.lab.diagnose.attach import (
    comparison_text,
    find_records,
    read_records,
    waits,
    waits_table,
)
from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.run import activity
from hybridengine.run.activity import Activity, Record
from hybridengine.run.errors import ConfigError
from hybridengine.sync.resharder import Resharder
from tests.extras.remote.worlds import TIMEOUT_S, UNEVEN, build_engine, link_store, worlds
from tests.ranks import Ranks, run_ranks
from tests.sync.brute_force import fused_layout
from tests.sync.memory_engine import MemoryEngine, mesh_of, shard, values

SHAPES = {"q": ("column", (48, 20)), "norm": ("replicated", (13, 3))}
LIMIT_S = 60.0


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sleeping_rank(rank: int, world_size: int, port: int) -> None:
    """Sync once; then rank 1 does not come to the second sync until the test allows it."""
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    engine = MemoryEngine(fused_layout(SHAPES, 0, 1), 0, 1)
    full, mesh = values(SHAPES), mesh_of(world_size, 1)
    shards = {name: shard(full[name], mesh, 0) for name in SHAPES}
    resharder = Resharder(lambda: shards, engine, timeout_s=LIMIT_S)
    resharder.sync(1)
    store.set(f"pid/{rank}", str(os.getpid()))
    if rank == 1:
        store.wait(["go on"], timedelta(seconds=LIMIT_S))
    resharder.sync(2)


@pytest.mark.multirank
def test_attach_names_the_rank_that_does_not_come() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=LIMIT_S))
    with Ranks(sleeping_rank, 2, store.port) as ranks:
        pids = [int(store.get(f"pid/{rank}")) for rank in range(2)]
        late = "trainer rank 1 is what trainer rank 0 waits for; it is after the sync to version 1"
        for pid in pids:  # any process of the job leads to the others
            until(lambda p=pid: list(waits(find_records(str(p)))) == [late])
        [zero, one] = [r for r in find_records(str(pids[0])) if r.name.startswith("trainer")]
        assert zero.place == "the sync to version 2 while agreeing to start"
        assert (one.pid, one.place) == (pids[1], "after the sync to version 1")
        result = CliRunner().invoke(cli.app, ["doctor", "--attach", str(pids[0])])
        assert result.exit_code == 0 and late in result.output
        store.set("go on", "1")
        ranks.results()
    assert not [record for record in read_records() if record.pid in pids]


def slow_trainer(rank: int, world_size: int, port: int) -> None:
    store, mesh = link_store(port), mesh_of(world_size, 1)
    shards = {name: shard(values(UNEVEN)[name], mesh, 0) for name in UNEVEN}
    sender = WeightSender(lambda: shards, store, num_engines=1, timeout_s=TIMEOUT_S)
    store.set(f"pid/{rank}", str(os.getpid()))
    sender.sync(1)


def late_engine(rank: int, world_size: int, port: int) -> None:
    store = link_store(port)
    receiver = WeightReceiver(build_engine(0, 1), store, index=0, timeout_s=TIMEOUT_S)
    receiver.rank.phase = "generating"
    store.wait(["go on"], timedelta(seconds=TIMEOUT_S))
    receiver.receive()


@pytest.mark.multirank
def test_attach_names_the_engine_that_trainers_wait_for() -> None:
    with worlds((slow_trainer, 2), (late_engine, 1)) as (port, trainers, engine):
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=LIMIT_S))
        pid = store.get("pid/1").decode()
        until(lambda: any("it is generating" in line for line in waits(find_records(pid))))
        [line] = waits(find_records(pid))
        assert line == (
            "engine 0 is what trainer rank 0, trainer rank 1 wait for; it is generating"
        )
        store.set("go on", "1")
        trainers.results(), engine.results()


def damaged_engine(rank: int, world_size: int) -> list[str]:
    """The second sync is verified on request of rank 1 alone; something has changed the engine."""
    engine = MemoryEngine(fused_layout(SHAPES, 0, 1), 0, 1)
    full, mesh = values(SHAPES), mesh_of(world_size, 1)
    shards = {name: shard(full[name], mesh, 0) for name in SHAPES}
    resharder = Resharder(lambda: shards, engine)
    own = resharder.guard.activity
    texts = []
    for version in (1, 2, 3):
        if rank == 1 and version > 1:
            folder = activity.private_folder()
            assert folder is not None
            (folder / f"{os.getpid()}.{activity.VERIFY}").touch(0o600)
        if version == 3:
            resharder.finish_on_device = lambda phase: engine.tensors["norm"].add_(1)
            with pytest.raises(RuntimeError, match="checksum"):
                resharder.sync(version)
        else:
            resharder.sync(version)
        texts += comparison_text([own.record])
    return texts


@pytest.mark.multirank
def test_a_requested_sync_is_verified_on_all_ranks() -> None:
    for rank, (second, third) in enumerate(run_ranks(damaged_engine, 2)):
        start = f"trainer rank {rank}: after the sync to version"
        assert second == f"{start} 2 every engine tensor was the trainer's"
        assert third.startswith(f"{start} 3 ") and "slices differed: " in third


def record(name: str, pid: int, in_world: str = "w", **changes: object) -> Record:
    rank = int(name.split()[-1]) if name.startswith("trainer") else 0
    return Record(pid, name, rank, 3, 0.0, 0.0, [in_world], **changes)


def test_a_rank_without_a_record_is_named() -> None:
    waiting = dict(collective="1/committing", world="w", place="the sync while committing")
    records = [record("trainer rank 0", 1, **waiting), record("trainer rank 2", 3, **waiting)]
    [line] = waits(records)
    assert line.startswith("rank 1, of which there is no record here is what trainer rank 0, ")
    assert waits_table(records).row_count == 2


def test_a_chain_of_waits_ends_at_its_cause() -> None:
    """Rank 2 waits for rank 1, which waits for an engine that is not in the sync."""
    inside = dict(collective="1/waiting", world="w", place="waiting")
    records = [
        record("trainer rank 0", 1, **inside, waits_for=("engine 0",)),
        record("trainer rank 1", 2, **inside),
        record("trainer rank 2", 3, **inside),
        record("rank 0 of engine 0", 4, "e", place="generating"),
    ]
    [line] = waits(records)
    assert line.endswith("wait for; it is generating") and line.startswith("engine 0 is what")


def test_records_are_private_and_go_with_their_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "SHARED_MEMORY", tmp_path)
    own = Activity("trainer rank 0", 0, 1)
    own.enter("somewhere")
    [folder] = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    [file] = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [r.place for r in read_records()] == ["somewhere"]
    gone = folder / "4194305.0"  # no process has that number
    gone.write_bytes(file.read_bytes())
    (folder / f"{os.getpid()}.77").write_text("not JSON")
    (folder / "notes.txt").write_text("somebody's")
    assert len(read_records()) == 1 and not gone.exists()
    folder.chmod(0o755)  # others could have written here
    assert read_records() == []
    files = sorted(folder.iterdir())
    Activity("trainer rank 1", 1, 2).enter("somewhere else")
    assert sorted(folder.iterdir()) == files and "else" not in file.read_text()


SERVER = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""


def test_what_cannot_be_attached_to_is_a_user_error() -> None:
    # A process of its own: others' descendants may take part in a sync of another test.
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as own:
        try:
            assert own.stdout is not None
            port = int(own.stdout.readline())
            for target, reason in (
                ("http://example.org:80", "on this machine"),
                ("http://127.0.0.1", "with its port"),
                ("4194305", "cannot be read"),
                (str(own.pid), "takes part in a weight sync"),
                (f"http://127.0.0.1:{port}", f"process {own.pid}"),
            ):
                with pytest.raises(ConfigError, match=reason):
                    find_records(target)
        finally:
            own.kill()
