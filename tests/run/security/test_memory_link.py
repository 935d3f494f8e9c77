"""The Unix sockets over which trainers and engines of one machine share memory, and strangers."""

from __future__ import annotations

import os
import pickle
import socket
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.remote.sync import memory_link
from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.remote.sync.records import SyncStore
from hybridengine.remote.sync.sender import WeightSender
from tests.extras.remote.worlds import UNEVEN, build_engine, link_store, worlds
from tests.sync.memory_engine import expected, mesh_of, shard, values

pytestmark = pytest.mark.multirank

NOBODY = 65534


class Bomb:
    """Its pickle creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.file),)


def visit(address: str, hello: bytes, user: int | None, connected: Event) -> None:
    """Send `hello` as a process of `user`; fail if it is answered."""
    if user is not None:
        os.setuid(user)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{address}")
        connected.set()
        try:
            connection.sendall(hello)
            assert connection.recv(100) == b""
        except ConnectionError:
            pass


def trainer_body(rank: int, world_size: int, port: int, made: Path) -> list[int | None]:
    """Sync once; strangers come before the member. Return their exit codes."""
    visitors: list[BaseProcess] = []
    context = get_context("fork")
    set_value = SyncStore.set

    def set_with_visits(store: SyncStore, key: str, told: Any) -> None:
        if isinstance(told, memory_link.Listener):
            pack, size, member = memory_link.HELLO.pack, memory_link.HELLO.size, world_size
            hellos = [bytes(size), pickle.dumps(Bomb(made)).ljust(size), pack(told.token, 9)]
            visits: list[tuple[bytes, int | None]] = [(hello, None) for hello in hellos]
            if os.geteuid() == 0:  # the store shows the token to whoever reaches it
                visits.append((pack(told.token, member), NOBODY))
            for hello, user in visits:
                connected = context.Event()
                arguments = told.address, hello, user, connected
                visitors.append(context.Process(target=visit, args=arguments))
                visitors[-1].start()
                assert connected.wait(200)  # the listener finds it before the member
        set_value(store, key, told)

    SyncStore.set = set_with_visits  # type: ignore[method-assign]
    mesh = mesh_of(world_size, 1)
    shards = {name: shard(tensor, mesh, 0) for name, tensor in values(UNEVEN).items()}
    WeightSender(lambda: shards, link_store(port), num_engines=1, timeout_s=200).sync(1)
    for visitor in visitors:
        visitor.join()
    return [visitor.exitcode for visitor in visitors]


def engine_body(rank: int, world_size: int, port: int) -> bool:
    engine = build_engine(rank, world_size)
    WeightReceiver(engine, link_store(port), index=0, timeout_s=200).receive()
    want = expected(engine, values(UNEVEN))
    return all(torch.equal(engine.tensors[name], tensor) for name, tensor in want.items())


def test_strangers_get_nothing_and_change_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    with worlds((trainer_body, 1, made), (engine_body, 1), over="memory") as (_, *started):
        [exit_codes], [is_right] = [ranks.results() for ranks in started]
    assert is_right and not made.exists()
    assert len(exit_codes) >= 3 and set(exit_codes) == {0}
