"""Messages between the ranks of the policy and those of the critic.

A step, from the side of the policy's ranks:

    begin    → numbers of all responses, prompts, tokens: each to the ranks that need them
    values   ← a value per response token
    update   → returns and masks; then both sides train at the same time
    finish   ← metrics of the critic's update

Tokens and what is computed of them go from rank to rank by `RowExchange`; no rank has those of all.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.config import GRPOConfig
from hybridengine.runtime.roles import Link
from hybridengine.trainer.exchange import Placement, RowExchange
from hybridengine.trainer.outcomes import Outcomes

T = TypeVar("T")

COLUMNS = ("response_ids", "log_probs", "sampled", "context_ids")  # what a critic's batch needs


@dataclass(frozen=True)
class Setup:
    """What the critic is built from. num_updates: its optimizer steps in the whole run."""

    config: GRPOConfig
    num_updates: int


@dataclass(frozen=True)
class Ready:
    """The critic is built."""

    optimizer_state: Mapping[str, Any]


@dataclass(frozen=True)
class TrainStep:
    """A step begins. prompts: the token ids of each group. actor: which of the policy's ranks hold
    which responses."""

    step: int
    outcomes: Outcomes
    prompts: Sequence[Sequence[int]]
    actor: Placement


@dataclass(frozen=True)
class SaveTensors:
    """Write the critic's tensors into this folder of a checkpoint."""

    folder: Path


@dataclass(frozen=True)
class LoadTensors:
    """Load the critic's tensors from this folder of a checkpoint."""

    folder: Path
    optimizer_state: Mapping[str, Any]


@dataclass(frozen=True)
class End:
    how: Literal["finished", "stopped"]


Command = TrainStep | SaveTensors | LoadTensors | End


@dataclass(frozen=True)
class StepReport:
    """What the critic reports after its update.

    seconds: by phase, without waiting. skipped_norms: of updates skipped in this step. num_bytes:
    of its tensors in a checkpoint. signal: number of a stop signal to its first rank.
    """

    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    skipped_norms: Sequence[float]
    skipped_in_a_row: int
    optimizer_state: Mapping[str, Any]
    num_bytes: int
    signal: int


class CriticChannel:
    """A gloo group of the policy's ranks, then the critic's. All methods are collective over it.

    A rank that waits longer than trainer.timeout_s fails with a timeout, as in every collective.
    """

    def __init__(self, link: Link) -> None:
        roles, role = link.roles, link.role
        self.num_actors, self.num_critics = roles.num_trainers, roles.num_critics
        self._rank = role.rank + (self.num_actors if role.kind == "critic" else 0)
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("critic", link.store),
            self._rank,
            self.num_actors + self.num_critics,
            timedelta(seconds=link.timeout_s),
        )

    def from_actor(self, value: T | None = None) -> T:
        """Return the value that the policy's first rank passes, on every rank."""
        return self._broadcast(value, 0)

    def from_critic(self, value: T | None = None) -> T:
        """Return the value that the critic's first rank passes, on every rank."""
        return self._broadcast(value, self.num_actors)

    def _broadcast(self, value: T | None, source: int) -> T:
        is_source = self._rank == source
        message = pickle.dumps(value) if is_source else b""
        size = torch.tensor([len(message)])
        self._group.broadcast(size, source).wait()
        if is_source:
            buffer = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        else:
            buffer = torch.empty(int(size), dtype=torch.uint8)
        self._group.broadcast(buffer, source).wait()
        received: T = value if is_source else pickle.loads(buffer.numpy().tobytes())  # type: ignore[assignment]
        return received

    def to_critic(self, sources: Tensor, critic: Placement) -> RowExchange:
        """Return what moves rows to the critic's ranks; sources: int64 [N], the policy's ranks."""
        nothing: list[Sequence[int]] = [()] * self.num_actors
        return RowExchange(sources, [*nothing, *critic.held], self._group)

    def to_actor(self, critic: Placement, actor: Placement) -> RowExchange:
        """Return what moves rows from the critic's ranks to the policy's."""
        nothing: list[Sequence[int]] = [()] * self.num_critics
        sources = critic.sources + self.num_actors
        return RowExchange(sources, [*actor.held, *nothing], self._group)


def saved_key(folder: Path) -> str:
    """Return the key of the link's store under which the critic announces a checkpoint's files."""
    return f"critic_saved/{folder.name}"
