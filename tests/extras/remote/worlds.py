"""Trainers and engines in process groups of their own, joined by one store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from hybridengine.remote.sync import sender
from hybridengine.remote.sync.link import GroupLink, feeders_of
from hybridengine.remote.sync.receiver import WeightReceiver
from tests.ranks import Ranks
from tests.sync.brute_force import fused_layout
from tests.sync.memory_engine import MemoryEngine, shapes_of, values

# Rows that divide by nothing, fewer rows than ranks, a row-parallel weight, and one by the loader.
UNEVEN = shapes_of(
    column={"q": (48, 20), "gate": (480, 20)},
    row={"out": (12, 18)},
    replicated={"norm": (13, 3), "one": (1, 2), "computed": (7, 5)},
)
FACTORS = {1: 1.0, 2: -3.0, 3: 0.5}  # by version: the parameters are multiplied, later by 2
TIMEOUT_S = 60.0


def link_store(port: int) -> dist.TCPStore:
    """Return the store of `worlds`; senders of this process use the links that it tells."""
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    over = store.get("test/over").decode()

    def feeders(trainers, devices, infos):
        members = sorted(member for info in infos for member in info.members())
        return {member: [i % len(trainers)] for i, member in enumerate(members)}

    def mixed(trainers, devices, infos):
        far = any(info.index for info in infos)
        return None if far else feeders_of(trainers, devices, infos)

    links = {"relayed": feeders, "mixed": mixed, "groups": lambda *args: None, "memory": feeders_of}
    sender.feeders_of = links[over]
    return store


def wait_for_dropped(store: dist.Store, rank: int, version: int, dropped_in: int) -> None:
    """On a trainer rank after each sync: wait for the engine that one of them drops."""
    if rank == 0:
        store.set(f"test/synced {version}", "1")
    if version == dropped_in:
        store.wait(["test/back"], timedelta(seconds=200))


def come_back(store: dist.Store, receiver: WeightReceiver, version: int) -> None:
    """On the engine that was dropped in the sync to `version`."""
    store.wait([f"test/synced {version}"], timedelta(seconds=200))
    assert not receiver.pending()  # shows that it is back
    store.set("test/back", "1")


def full_at(version: int) -> dict[str, torch.Tensor]:
    full = values(UNEVEN)
    for v in range(1, version + 1):
        full = {name: tensor * FACTORS.get(v, 2.0) for name, tensor in full.items()}
    return full


def build_engine(tp_rank: int, tp_size: int) -> MemoryEngine:
    layout = fused_layout(UNEVEN, tp_rank, tp_size)
    layout.fallback, layout.by_loader = {"computed": "computed: computed by mul"}, {"computed"}
    layout.copies = [c for c in layout.copies if c.source != "computed"]
    return MemoryEngine(layout, tp_rank, tp_size)


@contextmanager
def worlds(*arguments: tuple, timeout_s: float = 400.0, over: str = "groups") -> Iterator[tuple]:
    """Start a world for each (function, ranks, *arguments); all get the port of one store.

    over: the links between trainers and engines: process "groups", "memory" that all of them map,
    "mixed", the latter for engine 0 alone, or "relayed", memory of one trainer for each engine
    rank, as on GPUs.

    Yields (port, *worlds).
    """
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    store.set("test/over", over)
    with ExitStack() as stack:
        started = [
            stack.enter_context(Ranks(fn, ranks, store.port, *rest, timeout_s=timeout_s))
            for fn, ranks, *rest in arguments
        ]
        yield store.port, *started


def damage_arrivals(times: int) -> None:
    """Flip a bit of the next `times` messages that this process receives."""
    receive, left = GroupLink.receive, iter(range(times))

    def receive_damaged(link, sizes, largest):
        pending = receive(link, sizes, largest)
        wait = pending.wait

        def wait_damaged():
            arrived = wait()
            if sizes.any() and next(left, None) is not None:
                part = next(part for part in arrived if part.numel())
                part[min(7, part.numel() - 1)] ^= 128
            return arrived

        pending.wait = wait_damaged
        return pending

    GroupLink.receive = receive_damaged
