"""The queue between trainer ranks and engines: items in the store, rollouts over gloo.

Trainer rank 0 writes numbered items to the store. An engine that is free claims the next number,
generates, announces the result in the store, and sends the rollouts to one trainer rank; the send
completes when that rank receives them. Nothing here is collective over both roles, so an engine
never waits for another one.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from hybridengine.rollout import SamplingSpec
from hybridengine.runtime.polling import wait_until
from hybridengine.runtime.roles import Link
from hybridengine.trainer.rollouts import ScoredResponse


@dataclass(frozen=True)
class WorkItem:
    """Prompts that one engine generates at once.

    batch: number of its batch. positions: of its prompts in that batch, which with `seed` set the
    random numbers, so that responses do not depend on the engine that generates them. indices: of
    the samples in the dataset. min_version: of the weights. receiver: the trainer rank that gets
    the rollouts.
    """

    number: int
    batch: int
    dataset: Literal["train", "val"]
    positions: range
    indices: Sequence[int]
    spec: SamplingSpec
    seed: int
    min_version: int
    receiver: int


@dataclass(frozen=True)
class Finished:
    """What an engine announces of an item.

    version: of the weights that sampled its oldest token. seconds: by what the engine did, since
    its last announcement: gen, reward, update_weights, idle.
    """

    number: int
    engine: int
    version: int
    num_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)


def report_signal(link: Link, number: int) -> None:
    """Tell the trainer ranks of a stop signal to this rank."""
    link.store.set("signal", str(number))


class _Queue:
    """The store, and point-to-point messages between the trainer ranks and each engine's first.

    Collective at its construction over all of these.
    """

    def __init__(self, link: Link) -> None:
        roles, role = link.roles, link.role
        self.link = link
        self._store: Any = link.store  # torch's stubs do not know values of bytes
        rank = role.rank if role.engine is None else roles.num_trainers + role.engine
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("rollouts", link.store),
            rank,
            roles.num_trainers + roles.num_engines,
            timedelta(seconds=link.timeout_s),
        )

    def _read(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None


class TrainerQueue(_Queue):
    """One trainer rank's side."""

    def submit(self, item: WorkItem) -> None:
        self._store.set(f"item/{item.number}", pickle.dumps(item))

    def finished(self, number: int) -> Finished | None:
        """Return what an engine has announced of an item, None before."""
        announced = self._read(f"finished/{number}")
        return None if announced is None else pickle.loads(announced)

    def receive(self, result: Finished) -> list[ScoredResponse]:
        """Receive the responses of a finished item."""
        buffer = torch.empty(result.num_bytes, dtype=torch.uint8)
        source = self.link.roles.num_trainers + result.engine
        self._group.recv([buffer], source, result.number).wait()
        self._store.set(f"received/{result.number}", "")
        responses: list[ScoredResponse] = pickle.loads(buffer.numpy().tobytes())
        return responses

    def wants_weights(self) -> bool:
        """Return whether an engine has lost its weights and waits for new ones."""
        return bool(self._store.check(["weights_wanted"]))

    def weights_follow(self) -> None:
        """A sync follows, for the engines that wait for weights."""
        self._store.delete_key("weights_wanted")

    def signal(self) -> int:
        """Return the number of a stop signal that an engine rank has received; 0: none."""
        return int(self._read("signal") or 0)

    def end(self, how: Literal["finished", "stopped"]) -> None:
        """Tell the engines to end, and wait until they have."""
        self._store.set("end", how)
        for engine in range(self.link.roles.num_engines):
            what = f"engine {engine} to end"
            wait_until(partial(self._read, f"ended/{engine}"), self.link.timeout_s, what)


class EngineQueue(_Queue):
    """The side of an engine's first rank."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        assert link.role.engine is not None
        self._engine = link.role.engine
        self._claimed: int | None = None
        self._item: WorkItem | None = None
        self._sending: dict[int, tuple[dist.Work, torch.Tensor]] = {}

    def peek(self) -> WorkItem | None:
        """Return the next item of this engine, None while there is none."""
        if self._item is None:
            if self._claimed is None:
                self._claimed = self._store.add("claimed", 1) - 1
            if (written := self._read(f"item/{self._claimed}")) is not None:
                self._item = pickle.loads(written)
        return self._item

    def pop(self) -> None:
        """The item that `peek` returned is taken."""
        assert self._item is not None
        self._store.delete_key(f"item/{self._item.number}")
        self._item = self._claimed = None

    def put_back(self, item: WorkItem) -> None:
        """Return what `pop` took, to be the next item again."""
        self._item = item

    def request_weights(self) -> None:
        """Ask the trainer ranks for a sync, because this engine has lost its weights."""
        self._store.set("weights_wanted", "")

    def send(
        self,
        item: WorkItem,
        responses: Sequence[ScoredResponse],
        version: int,
        seconds: dict[str, float],
    ) -> None:
        """Announce an item's responses and start to send them; does not wait."""
        message = bytearray(pickle.dumps(list(responses)))
        buffer = torch.frombuffer(message, dtype=torch.uint8)
        work = self._group.send([buffer], item.receiver, item.number)
        self._sending[item.number] = (work, buffer)
        finished = Finished(item.number, self._engine, version, len(message), seconds)
        self._store.set(f"finished/{item.number}", pickle.dumps(finished))

    def release(self) -> None:
        """Free the messages that have been received."""
        for number in [n for n in self._sending if self._store.check([f"received/{n}"])]:
            work, _ = self._sending.pop(number)
            work.wait()
            for kind in ("received", "finished"):
                self._store.delete_key(f"{kind}/{number}")

    def ended(self) -> Literal["finished", "stopped"] | None:
        """Return how the run ended, None before."""
        how = self._read("end")
        return None if how is None else how.decode()  # type: ignore[return-value]

    def confirm_end(self) -> None:
        self._store.set(f"ended/{self._engine}", "")
