"""One rank of a critic that is on ranks of its own: values, then an update, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from hybridengine.model import Optimizer
from hybridengine.remote.critic import channel
from hybridengine.remote.roles import RoleLink
from hybridengine.run.session import Session
from hybridengine.train.build import build_critic, build_data_parallel, import_external
from hybridengine.train.checkpoint.tensors import TensorFiles, reason_of, remote_folder
from hybridengine.train.choices import agree
from hybridengine.train.data import PromptSample, Subset
from hybridengine.train.exchange import RowLocations
from hybridengine.train.rollouts import Rollouts

_WAITING = "wait_for_actor"


class CriticWorker:
    """One rank of the critic's world, which follows the commands of the policy's ranks.

    The critic is the one of a run without ranks of its own: same batch, same seed, other splits.
    """

    def __init__(self, session: Session, link: RoleLink) -> None:
        self._session, self._link = session, link
        with session.phase("connect_critic"):
            self._channel = channel.CriticChannel(self._link)
            setup: channel.Setup = self._channel.from_actor(channel.Setup)
        self._config = config = setup.config  # with the same data types
        torch.manual_seed(config.seed)
        with session.phase("load_model"):
            import_external(config)
            _, choices = agree(config)
            self._dp = build_data_parallel(config, session, choices)
            self._critic = build_critic(config, self._dp, setup.num_updates)
        model, optimizer = self._critic.model, self._critic.optimizer
        self._tensors = PartWriter(self._critic.name, model, optimizer, self._announce)
        self._channel.from_critic(channel.Ready, channel.Ready(optimizer.state_dict()))

    def run(self) -> None:
        """Work until the policy's ranks end the run."""
        session = self._session
        session.signals.can_wait = True
        while not isinstance(command := self._next_command(), channel.End):
            if isinstance(command, channel.TrainStep):
                self._train(command)
            elif isinstance(command, channel.SaveTensors):
                with session.phase("save_checkpoint"):
                    self._tensors.save(command.folder)
            else:
                self._load(command)
        self._tensors.wait()
        session.was_stopped = command.how == "stopped"

    def _next_command(self) -> channel.Command:
        with self._session.phase(_WAITING):
            command: channel.Command = self._channel.from_actor(channel.Command)
            return command

    def _train(self, command: channel.TrainStep) -> None:
        session, critic, config = self._session, self._critic, self._config
        session.step = command.step
        session.take_timings()
        prompts = [
            PromptSample(i, [*ids], "", "", None, {}, images=images)
            for i, (ids, images) in enumerate(zip(command.prompts, command.images, strict=True))
        ]
        rollouts = Rollouts(Subset(prompts, range(len(prompts))), command.outcomes, [], rank=-1)

        def receive(placement: RowLocations) -> Mapping[str, Tensor]:
            self._channel.from_critic(RowLocations, placement)
            exchange = self._channel.to_critic(command.outcomes.ranks, placement)
            return rollouts.move(exchange, channel.COLUMNS)

        num_mini_batches = config.data.train_batch_size // config.ppo_mini_batch_size
        max_tokens = config.actor.ppo_max_token_len_per_gpu
        batch = self._dp.build_batch(rollouts, num_mini_batches, max_tokens, receive)
        values, lengths = critic.values(batch), command.outcomes.response_lengths
        with session.phase(_WAITING):
            self._channel.to_actor(batch.placement, command.actor)(values.cpu(), lengths)
            exchange = self._channel.to_critic(command.actor.sources, batch.placement)
            returns = exchange(torch.empty(0), lengths).to(values.device)
            mask = exchange(torch.empty(0, dtype=torch.int8), lengths).to(values.device).bool()
        mask &= not batch.is_dummy
        batch = replace(batch, values=values, returns=returns, response_mask=mask)
        self._report(critic.update(batch))

    def _report(self, metrics: Mapping[str, float]) -> None:
        optimizer, seconds = self._critic.optimizer, self._session.take_timings()
        del seconds[_WAITING]
        self._channel.from_critic(
            channel.StepReport,
            channel.StepReport(
                metrics,
                seconds,
                optimizer.pop_skipped(),
                optimizer.state_dict(),
                self._tensors.num_bytes,
                self._session.signals.requested,
            ),
        )

    def _load(self, command: channel.LoadTensors) -> None:
        with self._session.phase("resume"):
            self._tensors.load(command.folder)
            self._critic.optimizer.load_state_dict(dict(command.optimizer_state))

    def _announce(self, folder: Path, answer: Mapping[str, list[int]] | str) -> None:
        """Tell the policy's first rank what is written, or why it is not."""
        if self._session.is_main:
            self._link.store.set(channel.saved_key(folder), answer)


class PartWriter:
    """The side of a `RemotePart`'s ranks. All methods are collective over them.

    announce: called on every rank, from a thread, with the folder of a checkpoint and the records
    of the files that all ranks have written, or the reason why they are not.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: Optimizer,
        announce: Callable[[Path, Mapping[str, list[int]] | str], None],
    ) -> None:
        self._files = TensorFiles({name: (model, optimizer)}, remote_folder(name))
        self._subfolder, self._announce = remote_folder(name), announce
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    @property
    def num_bytes(self) -> int:
        return self._files.num_bytes

    def save(self, folder: Path) -> None:
        """Start a save; return when all tensors are copied to host memory."""
        self.wait()
        self._pending = self._worker.submit(self._finish, self._files.save(folder), folder)

    def wait(self) -> None:
        """Wait until a started save is announced."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, folder: Path) -> None:
        """Load the tensors of a checkpoint, which the policy's ranks have verified."""
        self._files.load(folder)

    def _finish(self, saving: Future[Any], folder: Path) -> None:
        try:
            saving.result()
            files = (folder / self._subfolder).rglob("*")
            answer: Mapping[str, list[int]] | str = self._files.records(
                folder, files, f"saving {self._subfolder}"
            )
        except (Exception, dcp.CheckpointException) as error:  # others wait for an answer
            answer = f"saving failed{reason_of(error)}"
        self._announce(folder, answer)
