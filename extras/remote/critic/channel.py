"""How the ranks of the policy and those of the critic reach each other, and their messages.

A step, from the side of the policy's ranks:

    begin    → numbers of all responses, prompts, tokens: each to the ranks that need them
    values   ← a value per response token
    update   → returns and masks; then both sides train at the same time
    finish   ← metrics of the critic's update

Tokens and what is computed of them go from rank to rank by `RowExchange`; no rank has those of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec import Struct
from torch import Tensor

from hybridengine.model import SkippedUpdate
from hybridengine.model.attachments import Attachment
from hybridengine.remote.messages import wait_until
from hybridengine.remote.roles import Role, RoleLink
from hybridengine.run.config import RLConfig
from hybridengine.run.messages import broadcast_value
from hybridengine.train.exchange import RowExchange, RowLocations
from hybridengine.train.rollouts import Outcomes

# What a critic's batch needs.
COLUMNS = ("token_ids", "log_probs", "sampled", "context_ids", "images")


class Setup(Struct):
    """What the critic is built from. num_updates: its optimizer steps in the whole run."""

    config: RLConfig
    num_updates: int


class Ready(Struct):
    """The critic is built."""

    optimizer_state: Mapping[str, Any]


class TrainStep(Struct, tag=True):
    """A step begins.

    prompts: the token ids of each group.
    images: of the prompt of each group.
    actor: which of the policy's ranks hold which responses.
    """

    step: int
    outcomes: Outcomes
    prompts: Sequence[Sequence[int]]
    images: Sequence[Sequence[Attachment]]
    actor: RowLocations


class SaveTensors(Struct, tag=True):
    """Write the critic's tensors into this folder of a checkpoint."""

    folder: Path


class LoadTensors(Struct, tag=True):
    """Load the critic's tensors from this folder of a checkpoint."""

    folder: Path
    optimizer_state: Mapping[str, Any]


class End(Struct, tag=True):
    how: Literal["finished", "stopped"]


Command = TrainStep | SaveTensors | LoadTensors | End


class StepReport(Struct):
    """What the critic reports after its update.

    seconds: by phase, without waiting.
    skipped: updates of this step.
    num_bytes: of its tensors in a checkpoint.
    signal: number of a stop signal to its first rank.
    """

    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    skipped: Sequence[SkippedUpdate]
    optimizer_state: Mapping[str, Any]
    num_bytes: int
    signal: int


def saved_key(folder: Path) -> str:
    """Return the key of the link's store under which the critic announces a checkpoint's files."""
    return f"critic_saved/{folder.name}"


T = TypeVar("T")


class CriticChannel:
    """A gloo group of the policy's ranks, then the critic's. All methods are collective over it.

    A rank that waits longer than trainer.timeout_s fails with a timeout, as in every collective.
    """

    def __init__(self, link: RoleLink) -> None:
        roles = link.roles
        self._link, self._num_sent = link, 0
        self.num_actors, self.num_critics = roles.num_trainers, roles.num_critics
        sizes = {"trainer": self.num_actors, "critic": self.num_critics}
        names = [Role.name_of(world, rank) for world, n in sizes.items() for rank in range(n)]
        self._group = link.group("critic", names)

    def from_actor(self, expected: Any, value: T | None = None) -> T:
        """Return the value, of type `expected`, that the policy's first rank passes, everywhere.

        The critic's ranks wait for it longer than trainer.timeout_s where a disk is slow.
        """
        link, self._num_sent = self._link, self._num_sent + 1
        if link.role.kind == "critic":
            wait_until(self._is_sent, link.timeout_s, "the policy's ranks", link.is_writing)
        elif link.role.rank == 0:
            link.store.set("critic_sent", self._num_sent)
        return broadcast_value(value, expected, 0, self._group)

    def _is_sent(self) -> Literal[True] | None:
        return (self._link.store.get("critic_sent", int) or 0) >= self._num_sent or None

    def from_critic(self, expected: Any, value: T | None = None) -> T:
        """Return the value, of type `expected`, that the critic's first rank passes, everywhere."""
        return broadcast_value(value, expected, self.num_actors, self._group)

    def to_critic(self, sources: Tensor, critic: RowLocations) -> RowExchange:
        """Return what moves rows to the critic's ranks; sources: int64 [N], the policy's ranks."""
        nothing: list[Sequence[int]] = [()] * self.num_actors
        return RowExchange(sources, [*nothing, *critic.held], self._group)

    def to_actor(self, critic: RowLocations, actor: RowLocations) -> RowExchange:
        """Return what moves rows from the critic's ranks to the policy's."""
        nothing: list[Sequence[int]] = [()] * self.num_critics
        sources = critic.sources + self.num_actors
        return RowExchange(sources, [*actor.held, *nothing], self._group)
