"""Whoever reaches a store or a socket of a run neither runs code in it nor changes what it does."""

from __future__ import annotations

import os
import pickle
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.engine.interface import SamplingSpec
from hybridengine.remote.critic.channel import Command, End, TrainStep
from hybridengine.remote.overlap import queue
from hybridengine.remote.overlap.queue import EngineQueue, TrainerQueue, WorkItem
from hybridengine.remote.roles import RoleLink, Roles
from hybridengine.remote.servers.client import has_remote, prepare_network
from hybridengine.remote.sync.records import Holding, PlanInputs, SyncState, SyncStore
from hybridengine.run import messages
from hybridengine.run.errors import UserError
from hybridengine.run.failures import CollectiveGuard
from hybridengine.run.messages import (
    SECRET,
    MessageError,
    SignedStore,
    all_gather_values,
    broadcast_value,
    decode,
    encode,
    share_secret,
    sign,
)
from hybridengine.run.rank import join_start
from hybridengine.sync.shards import ShardSpec
from hybridengine.train.exchange import RowLocations
from tests.ranks import message_of, run_ranks


class Bomb:
    """Its pickle creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.file),)


def put(store: dist.Store, key: str, data: bytes | str) -> None:
    """Write a value and wait until it is there."""
    store.set(key, data)
    assert store.check([key])


class Pair(NamedTuple):
    first: int
    second: tuple[float, ...]


@dataclass(frozen=True)
class Record:
    name: str
    pairs: list[Pair]
    tensor: torch.Tensor
    dtype: torch.dtype
    positions: range
    path: Path
    missing: Pair | str | None = None


@pytest.fixture
def stores() -> tuple[dist.TCPStore, dist.TCPStore]:
    """The store of a run, and the connection of somebody else."""
    limit = timedelta(seconds=60)
    ours = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=limit)
    return ours, dist.TCPStore("127.0.0.1", ours.port, None, is_master=False, timeout=limit)


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(6.0).view(2, 3).bfloat16().T, torch.tensor(True), torch.empty(0, 3)],
)
def test_a_message_is_what_was_sent(tensor: torch.Tensor) -> None:
    sent = Record(
        "é",
        [Pair(2**63 - 1, (0.1, float("inf")))],
        tensor,
        torch.float8_e4m3fn,
        range(3, 9, 2),
        Path("/a/b"),
        "none",
    )
    read = decode(encode(sent), Record, "it")
    assert torch.equal(read.tensor, sent.tensor) and read.tensor.dtype == sent.tensor.dtype
    fields = [f for f in vars(sent) if f != "tensor"]
    assert [getattr(read, f) for f in fields] == [getattr(sent, f) for f in fields]
    assert decode(encode(array("f", [0.5, 2])), list[float], "it") == [0.5, 2.0]
    assert decode(encode(Holding(False, 3)), Holding | str, "it") == Holding(False, 3)


def test_commands_are_told_apart() -> None:
    for command in (End("stopped"), End("finished")):
        assert decode(encode(command), Command, "it") == command
    with pytest.raises(MessageError):
        decode(encode(RowLocations([[0]], torch.zeros(1))), Command, "it")
    assert TrainStep.__struct_config__.tag != End.__struct_config__.tag


def test_parameters_share_their_holders() -> None:
    holders = tuple((rank,) for rank in range(512))
    specs = {
        f"p{i}": ShardSpec.along((1024, 8), torch.float32, 0, holders, frozen=i % 2 == 0)
        for i in range(100)
    }
    sent = PlanInputs.of(specs, {}, {0: "digest"}, 1 << 20, [0] * 512)
    message = encode(sent)
    assert decode(message, PlanInputs, "it").specs == sent.specs == specs
    assert len(message) < 100 * 200, "the holders travel once"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"name": 1}, Record),
        ((1, "text"), Pair),
        (("float32", (4,), b"short"), torch.Tensor),
        (("float32", (-1,), b""), torch.Tensor),
        (("os.system", (1,), b"abcd"), torch.Tensor),
        ("system", torch.dtype),
        ("text", SyncState),
    ],
)
def test_a_message_of_another_type_is_an_error(value: object, expected: type) -> None:
    with pytest.raises(MessageError, match="it is no "):
        decode(encode(value), expected, "it")


@given(st.binary())
def test_bytes_of_any_kind_are_an_error(data: bytes) -> None:
    for expected in (SyncState, Record, list[Pair]):
        with pytest.raises(MessageError):
            decode(b"\xc1" + data, expected, "it")


def test_what_cannot_be_sent_is_an_error_where_it_is_sent() -> None:
    with pytest.raises(TypeError, match="a message cannot contain a Bomb"):
        encode([Bomb(Path("/tmp"))])


def test_values_of_others_are_refused(stores: tuple, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    ours, theirs = stores
    signed = SignedStore(ours, "a/b")
    signed.set("key", 7)
    assert signed.get("key", int) == 7 and signed.get("other", int) is None
    bomb = pickle.dumps(Bomb(tmp_path / "made"))
    good = theirs.get("a/b/key")
    forged = {
        "unsigned": encode(7),
        "pickle": bomb,
        "behind a code": bytes(32) + bomb,
        "empty": b"",
        "one bit": bytes([*good[:-1], good[-1] ^ 1]),
        "other secret": b"",
    }
    with monkeypatch.context() as other:
        other.setenv(SECRET, "the secret of somebody else")
        SignedStore(theirs, "a/b").set("key", 7)
        forged["other secret"] = theirs.get("a/b/key")
    for kind, data in forged.items():
        put(theirs, "a/b/key", data)
        with pytest.raises(MessageError, match=r"rank 3: the value of a/b/key .* was refused"):
            signed.get("key", int)
            pytest.fail(kind)
    put(theirs, "a/b/moved", good)
    with pytest.raises(MessageError, match="a/b/moved"):
        signed.get("moved", int)
    put(theirs, "a/c/b/key", good)
    with pytest.raises(MessageError, match="a/c/b/key"):
        SignedStore(ours, "a/c").get("b/key", int)
    put(theirs, "a/b/claimed", bomb)
    with pytest.raises(MessageError, match="a/b/claimed"):
        signed.claim("claimed", 1, int)
    put(theirs, "a/b/key", good)
    assert signed.get("key", int) == 7
    with pytest.raises(MessageError, match="is no <class 'str'>"):
        signed.get("key", str)
    assert not (tmp_path / "made").exists()


def test_one_process_gets_what_several_claim(stores: tuple) -> None:
    one, other = (SignedStore(store, "n") for store in stores)
    assert one.claim("0", 5, int) == 5 == other.claim("0", 6, int) == one.claim("0", 7, int)


def test_the_records_of_a_sync(stores: tuple, tmp_path: Path) -> None:
    ours, theirs = stores
    records = SyncStore(ours)
    bomb = pickle.dumps(Bomb(tmp_path / "made"))
    for key, read in {
        "sync": records.get_sync,
        "engine/0": lambda: records.get("engine/0", SyncState),
        "1/0/ready/0.1/0": lambda: records.all_marked("1/0/ready/0.1", 2),
        "beat": lambda: records.next_number("beat"),
    }.items():
        put(theirs, f"hybridengine/disaggregated/{key}", bomb)
        with pytest.raises(MessageError, match=key):
            read()
    assert not (tmp_path / "made").exists()


def exchanging_body(rank: int, world_size: int, forged: str, size: int) -> list[str]:
    """Exchange values where what rank 1 sends is no message of this run."""
    if rank == 1 and forged == "other secret":
        os.environ[SECRET] = "the secret of somebody else"
    elif rank == 1:
        messages.sign = (
            lambda name, message: {  # type: ignore[assignment]
                "unsigned": message,
                "one bit": (good := sign(name, message))[:-1] + bytes([good[-1] ^ 1]),
                "of rank 0": sign(name.replace("1", "0"), message),
            }[forged]
        )
    value = "x" * size
    return [
        message_of(lambda: all_gather_values(value, str)),
        message_of(lambda: broadcast_value(value, str, source=1)),
        message_of(lambda: broadcast_value(value, str, source=0)),
    ]


@pytest.mark.multirank
@pytest.mark.parametrize("size", [3, 3000])
@pytest.mark.parametrize("forged", ["unsigned", "one bit", "of rank 0", "other secret"])
def test_messages_between_ranks_are_signed(forged: str, size: int) -> None:
    gathered, of_rank1, of_rank0 = run_ranks(exchanging_body, 2, forged, size)[0]
    refused = "MessageError: rank 0: the message of rank 1 was refused: it is not signed by"
    assert gathered.startswith(refused) and of_rank1.startswith(refused)
    assert of_rank0 == "no error"


@pytest.fixture
def queues(stores: tuple, monkeypatch: pytest.MonkeyPatch) -> tuple[TrainerQueue, EngineQueue]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    roles = Roles(1, trainers_per_node=1, engines_per_node=1, tp_size=1)

    def make(kind: type, rank: int) -> Any:
        store = SignedStore(stores[0].clone(), "link")
        return kind(RoleLink(roles, roles.role_of(rank), store, 60.0))

    with ThreadPoolExecutor(2) as pool:
        trainer, engine = pool.map(make, (TrainerQueue, EngineQueue), (0, 1))
    return trainer, engine


def test_the_queue_of_rollouts(
    stores: tuple, queues: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, (trainer, engine) = stores[1], queues
    spec = SamplingSpec(max_tokens=1)
    trainer.submit(WorkItem(0, 0, "train", range(1), [0], spec, 0, 0, receiver=0))
    item = engine.peek()
    engine.pop()
    engine.send(item, [], 0, {})
    assert trainer.receive(trainer.finished(0)) == []
    monkeypatch.setattr(queue, "sign", lambda name, message, is_required: bytes(32) + message)
    trainer.submit(WorkItem(1, 1, "train", range(1), [0], spec, 0, 0, receiver=0))
    item = engine.peek()
    engine.pop()
    engine.send(item, [], 0, {})
    with pytest.raises(MessageError, match="the message of engine 0 was refused: it is not signed"):
        trainer.receive(trainer.finished(1))
    bomb = pickle.dumps(Bomb(tmp_path / "made"))
    for key, read in {
        "finished/0": lambda: trainer.finished(0),
        "weights_wanted": trainer.wants_weights,
        "signal": trainer.signal,
        "ended/0": trainer.wait_for_end,
        "received/0": engine.release,
        "end": engine.is_ended,
        "writing": engine.link.is_writing,
        "owner/2": engine.peek,
    }.items():
        put(theirs, f"link/{key}", bomb)
        with pytest.raises(MessageError, match=f"link/{key}"):
            read()
    theirs.delete_key("link/owner/2")
    put(theirs, "link/item/2", bomb)
    with pytest.raises(MessageError, match="link/item/2"):
        engine.peek()
    assert not (tmp_path / "made").exists()


def test_reports_of_ranks_that_others_write_are_warnings(stores: tuple) -> None:
    ours, theirs = stores
    guard = CollectiveGuard(0, 2, ours)
    put(theirs, f"{guard.prefix}/0/failure/1", "failed, says somebody")
    with pytest.warns(RuntimeWarning, match="failure/1 in the rendezvous store was refused"):
        assert guard.failed_rank() is None


def test_a_secret_is_required_of_worlds_that_are_started_apart(
    stores: tuple, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    for value in (None, "short"):
        monkeypatch.delenv(SECRET)
        if value is not None:
            monkeypatch.setenv(SECRET, value)
        for start in (
            lambda: SyncStore(stores[0]).set("sync", 1),
            lambda: join_start(0, 2, 5.0, tmp_path / "secret"),  # of a rank of several machines
            lambda: prepare_network(["http://127.0.0.1:8000"]),
        ):
            with pytest.raises(UserError, match=r"HYBRIDENGINE_SECRET is not set.*openssl rand"):
                start()
        monkeypatch.setenv(SECRET, "x")


def test_ranks_of_one_machine_share_a_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(SECRET)
    monkeypatch.setattr(messages, "secret_file", None)
    file = tmp_path / "secret"
    file.write_text("of an earlier run")
    share_secret(file, is_owner=True)
    made = os.environ.pop(SECRET)
    assert file.read_text() == made and len(made) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    share_secret(file, is_owner=False)
    assert SECRET not in os.environ
    assert messages.shared_secret(is_required=True) == made.encode()


def test_the_store_is_open_to_servers_on_other_machines_only() -> None:
    assert not has_remote(()) and not has_remote(["http://127.0.0.1:1", "http://localhost:2"])
    assert has_remote(["http://127.0.0.1:1", "http://192.0.2.1:2"])
