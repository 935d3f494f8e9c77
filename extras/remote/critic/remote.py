"""The critic on ranks of its own, as the ranks of the policy see it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hybridengine.model import SkippedUpdate
from hybridengine.remote.critic import channel
from hybridengine.remote.roles import RoleLink
from hybridengine.run.config import RLConfig
from hybridengine.run.messages import wait_for
from hybridengine.run.session import Session
from hybridengine.train.batch import RolloutBatch
from hybridengine.train.checkpoint import CheckpointError
from hybridengine.train.exchange import RowLocations
from hybridengine.train.models import ExternalCritic
from hybridengine.train.rollouts import Rollouts


class RemoteOptimizer:
    """What the critic's ranks last reported of their optimizer."""

    def __init__(self) -> None:
        self._skipped: list[SkippedUpdate] = []
        self._state: Mapping[str, Any] = {}

    @property
    def num_updates(self) -> int:
        return int(self._state["schedule_step"])

    @property
    def skipped_in_a_row(self) -> int:
        return int(self._state.get("skipped_in_a_row", 0))

    @property
    def failed_in_a_row(self) -> int:
        return int(self._state.get("failed_in_a_row", 0))

    def report(self, report: channel.StepReport) -> None:
        self._skipped += report.skipped
        self._state = report.optimizer_state

    def pop_skipped(self) -> list[SkippedUpdate]:
        """Return the updates skipped since the last call."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


class RemoteCritic(ExternalCritic):
    """Sends each step to the critic's ranks, which compute values and update at the same time."""

    name = "critic"

    def __init__(
        self, config: RLConfig, session: Session, link: RoleLink, num_updates: int
    ) -> None:
        self._session, self._link = session, link
        self.optimizer = RemoteOptimizer()
        self.num_bytes = 0
        self._signal = 0
        self._waited_s = 0.0  # of this step
        self._total = Counter[str]()  # seconds of the run: step, actor and critic idle
        with session.phase("connect_critic"):
            self._channel = channel.CriticChannel(self._link)
            self._channel.from_actor(channel.Setup, channel.Setup(config, num_updates))

    def wait_until_built(self) -> None:
        """Wait until the critic's ranks have loaded their model."""
        with self._session.phase("wait_for_critic"):
            ready: channel.Ready = self._channel.from_critic(channel.Ready)
        self.optimizer.load_state_dict(dict(ready.optimizer_state))

    def begin(self, step: int, rollouts: Rollouts, batch: RolloutBatch) -> None:
        self._actor, self._device = batch.placement, batch.response_mask.device
        self._lengths = rollouts.outcomes.response_lengths
        self._waited_s = 0.0
        with self._session.phase("send_rollouts"):
            command = None
            if self._session.is_main:
                prompts = [prompt.prompt_ids for prompt in rollouts.prompts]
                images = [prompt.images for prompt in rollouts.prompts]
                command = channel.TrainStep(step, rollouts.outcomes, prompts, images, self._actor)
            self._channel.from_actor(channel.Command, command)
            self._critic: RowLocations = self._channel.from_critic(RowLocations)
            exchange = self._channel.to_critic(rollouts.outcomes.ranks, self._critic)
            rollouts.move(exchange, channel.COLUMNS)

    def values(self, batch: RolloutBatch) -> Tensor:
        exchange = self._channel.to_actor(self._critic, self._actor)
        with self._waiting():
            return exchange(torch.empty(0), self._lengths).to(self._device)

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        assert batch.returns is not None
        exchange = self._channel.to_critic(self._actor.sources, self._critic)
        with self._session.phase("send_returns"):
            for column in (batch.returns, batch.response_mask.to(torch.int8)):
                exchange(column.cpu(), self._lengths)
        return {}

    def finish(self, seconds: float) -> dict[str, float]:
        before_s = self._waited_s
        with self._waiting():
            report: channel.StepReport = self._channel.from_critic(channel.StepReport)
        seconds += self._waited_s - before_s
        self.optimizer.report(report)
        self.num_bytes, self._signal = report.num_bytes, report.signal
        idle_s = {"actor": self._waited_s, "critic": seconds - sum(report.seconds.values())}
        self._total.update({"step": seconds, **idle_s})
        return {
            **report.metrics,
            **{f"timing_s/{phase}": report.seconds[phase] for phase in ("values", "update_critic")},
            **{f"{side}/idle_ratio": x / seconds for side, x in idle_s.items()},
        }

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        with self._session.phase("wait_for_critic"):
            yield
        self._waited_s += time.perf_counter() - started

    def stop_signal(self) -> int:
        return self._signal

    def summary(self) -> dict[str, Any]:
        seconds = max(self._total["step"], 1e-9)
        return {
            f"{side}_idle_ratio": round(self._total[side] / seconds, 4)
            for side in ("actor", "critic")
        }

    def close(self, how: Literal["finished", "stopped"]) -> None:
        with self._session.phase("end_critic"):
            self._channel.from_actor(channel.Command, channel.End(how))

    def save(self, folder: Path) -> None:
        """Start to write the critic's tensors into a checkpoint. Collective."""
        self._channel.from_actor(channel.Command, channel.SaveTensors(folder))

    def saved(self, folder: Path) -> Mapping[str, list[int]]:
        """Wait until `save` has written; return size and checksum of every file. On one rank.

        Raises CheckpointError if a rank of the critic could not write.
        """
        key, store = channel.saved_key(folder), self._link.store
        answer: dict[str, list[int]] | str = wait_for(
            lambda: store.get(key, dict[str, list[int]] | str)
        )  # each of its ranks limits its own write
        store.delete(key)
        if isinstance(answer, str):
            raise CheckpointError(f"the critic's ranks: {answer}")
        return answer

    def load(self, folder: Path) -> None:
        """Let the critic's ranks load their part of a checkpoint; `optimizer` is loaded already.

        Collective.
        """
        self._channel.from_actor(
            channel.Command, channel.LoadTensors(folder, self.optimizer.state_dict())
        )
