"""The queue between trainer ranks and engines: items in the store, rollouts over gloo.

Trainer rank 0 writes numbered items to the store. An engine that is free claims the next number,
generates, announces the result in the store, and sends the rollouts to one trainer rank; the send
completes when that rank receives them. Nothing here is collective over both roles, so an engine
never waits for another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from hybridengine.engine.interface import SamplingSpec
from hybridengine.remote.messages import wait_until
from hybridengine.remote.roles import Role, RoleLink
from hybridengine.run.messages import decode, encode, sign, verified
from hybridengine.train.rollouts import ScoredResponse


@dataclass(frozen=True)
class WorkItem:
    """Prompts that one engine generates at once.

    batch: number of its batch.
    positions: of its prompts in that batch, which with `seed` set the random numbers, so that
      responses do not depend on the engine that generates them.
    indices: of the samples in the dataset.
    min_version: of the weights.
    receiver: the trainer rank that gets the rollouts.
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

    version: of the weights that sampled its oldest token.
    seconds: by what the engine did, since its last announcement: gen, reward, update_weights, idle.
    """

    number: int
    engine: int
    version: int
    num_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)


def report_signal(link: RoleLink, number: int) -> None:
    """Tell the trainer ranks of a stop signal to this rank."""
    link.store.set("signal", number)


class _Queue:
    """The store, and point-to-point messages between the trainer ranks and each engine's first.

    Collective at its construction over all of these.
    """

    def __init__(self, link: RoleLink) -> None:
        roles, self.link = link.roles, link
        self._store = link.store
        trainers = [Role.name_of("trainer", rank) for rank in range(roles.num_trainers)]
        engines = [Role.name_of(f"engine {k}", 0) for k in range(roles.num_engines)]
        self._group = link.group("rollouts", [*trainers, *engines])


class TrainerQueue(_Queue):
    """One trainer rank's side."""

    def submit(self, item: WorkItem) -> None:
        self._store.set(f"item/{item.number}", item)

    def finished(self, number: int) -> Finished | None:
        """Return what an engine has announced of an item, None before."""
        announced: Finished | None = self._store.get(f"finished/{number}", Finished)
        return announced

    def receive(self, result: Finished) -> list[ScoredResponse]:
        """Receive the responses of a finished item."""
        buffer = torch.empty(result.num_bytes, dtype=torch.uint8)
        source = self.link.roles.num_trainers + result.engine
        self._group.recv([buffer], source, result.number).wait()
        self._store.set(f"received/{result.number}", True)
        what = f"the message of engine {result.engine}"
        message = verified(f"item/{result.number}", buffer.numpy().data, what, is_required=True)
        rollouts = decode(message, list[ScoredResponse], what)
        return [rollout.compact() for rollout in rollouts]

    def wants_weights(self) -> bool:
        """Return whether an engine has lost its weights and waits for new ones."""
        return bool(self._store.get("weights_wanted", bool))

    def weights_follow(self) -> None:
        """A sync follows, for the engines that wait for weights."""
        self._store.delete("weights_wanted")

    def signal(self) -> int:
        """Return the number of a stop signal that an engine rank has received; 0: none."""
        return self._store.get("signal", int) or 0

    def end(self) -> None:
        """Tell the engines to end as soon as they have generated what they generate now."""
        self._store.set("end", True)

    def wait_for_end(self) -> None:
        """Wait until all engines have ended."""
        for engine in range(self.link.roles.num_engines):
            ended = partial(self._store.get, f"ended/{engine}", bool)
            wait_until(ended, self.link.timeout_s, f"engine {engine} to end")


class EngineQueue(_Queue):
    """The side of an engine's first rank."""

    def __init__(self, link: RoleLink) -> None:
        super().__init__(link)
        assert link.role.engine is not None
        self._engine = link.role.engine
        self._next = 0  # the first item that it has not tried to claim
        self._claimed: int | None = None
        self._item: WorkItem | None = None
        self._sending: dict[int, tuple[dist.Work, torch.Tensor]] = {}

    def peek(self) -> WorkItem | None:
        """Return the next item of this engine, None while there is none."""
        if self._item is None:
            while self._claimed is None:
                owner = self._store.claim(f"owner/{self._next}", self._engine, int)
                self._claimed = self._next if owner == self._engine else None
                self._next += 1
            self._item = self._store.get(f"item/{self._claimed}", WorkItem)
        return self._item

    def pop(self) -> None:
        """The item that `peek` returned is taken."""
        assert self._item is not None
        self._store.delete(f"item/{self._item.number}")
        self._item = self._claimed = None

    def put_back(self, item: WorkItem) -> None:
        """Return what `pop` took, to be the next item again."""
        self._item = item

    def request_weights(self) -> None:
        """Ask the trainer ranks for a sync, because this engine has lost its weights."""
        self._store.set("weights_wanted", True)

    def send(
        self,
        item: WorkItem,
        responses: Sequence[ScoredResponse],
        version: int,
        seconds: dict[str, float],
    ) -> None:
        """Announce an item's responses and start to send them; does not wait."""
        signed = sign(f"item/{item.number}", encode(list(responses)), is_required=True)
        message = bytearray(signed)
        buffer = torch.frombuffer(message, dtype=torch.uint8)
        work = self._group.send([buffer], item.receiver, item.number)
        self._sending[item.number] = (work, buffer)
        finished = Finished(item.number, self._engine, version, len(message), seconds)
        self._store.set(f"finished/{item.number}", finished)

    def release(self) -> None:
        """Free the messages that have been received."""
        for number in [n for n in self._sending if self._store.get(f"received/{n}", bool)]:
            work, _ = self._sending.pop(number)
            work.wait()
            self._store.delete(f"received/{number}", f"finished/{number}")

    def is_ended(self) -> bool:
        """Return whether the trainer ranks need no more rollouts."""
        return bool(self._store.get("end", bool))

    def confirm_end(self) -> None:
        self._store.set(f"ended/{self._engine}", True)
