"""One rank of an engine that generates for the trainer ranks: take weights, generate, send."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal

import torch

from hybridengine.config import GRPOConfig
from hybridengine.runtime.session import Session
from hybridengine.trainer.build import build_agents, build_engine, build_receiver, load_data
from hybridengine.trainer.overlap.queue import EngineQueue, WorkItem, wait_until
from hybridengine.trainer.plan import resolve_dtypes
from hybridengine.trainer.rollouts import RolloutGenerator

Action = WorkItem | Literal["update", "finished", "stopped"]


class RolloutWorker:
    """One rank of one engine.

    The first rank of an engine chooses what to do next, and the others follow it. New weights are
    taken where the next item needs them, where there is no item, and in `async` before every item.
    """

    def __init__(self, config: GRPOConfig, session: Session) -> None:
        assert session.link is not None
        config = resolve_dtypes(config)
        self._session, self._link = session, session.link
        self._eager = config.trainer.mode == "async"
        torch.manual_seed(config.seed)
        with session.phase("load_data"):
            tokenizer, train, val, reward = load_data(_with_own_share_of_cores(config))
            self._datasets = {"train": train, "val": val}
        with session.phase("start_engine"):
            self._engine = build_engine(config, tokenizer)
        agents = build_agents(config, tokenizer)
        self._generator = RolloutGenerator(self._engine, tokenizer, reward, session, None, agents)
        with session.phase("plan_reshard"):
            self._receiver = build_receiver(self._engine, self._link)
        self._queue: EngineQueue | None = None
        if self._engine.tp_rank == 0:
            with session.phase("connect_roles"):
                self._queue = EngineQueue(self._link)
        session.take_timings()

    def run(self) -> None:
        """Work until the trainer ranks end the run."""
        session, engine = self._session, self._engine
        session.let_steps_finish()
        while not isinstance(action := self._next_action(), str) or action == "update":
            if isinstance(action, WorkItem):
                self._generate(action)
            else:
                with session.phase("update_weights"):
                    self._receiver.receive()
        session.was_stopped = action == "stopped"
        engine.shutdown()
        if self._queue is not None:
            self._queue.confirm_end()

    def _next_action(self) -> Action:
        """Wait for the next action, the same on every rank of the engine. Collective over them."""
        with self._session.phase("idle"):
            timeout_s, what = self._link.timeout_s, "work from the trainer ranks"
            return wait_until(self._choose, timeout_s, what)

    def _choose(self) -> Action | None:
        """Choose what to do next, None while there is nothing. Collective."""
        pending, action = self._receiver.pending(), None
        if self._queue is not None:
            action = self._choose_on_first_rank(self._queue, pending)
        return self._engine.broadcast(action)

    def _choose_on_first_rank(self, queue: EngineQueue, pending: bool) -> Action | None:
        queue.release()
        if number := self._session.requested_signal:
            queue.report_signal(number)
        item, version = queue.peek(), self._engine.weight_version
        can_run = item is not None and version is not None and item.min_version <= version
        if pending and (self._eager or not can_run):
            return "update"
        if can_run:
            queue.pop()
            return item
        return queue.ended()

    def _generate(self, item: WorkItem) -> None:
        session, engine = self._session, self._engine
        session.step = item.batch
        dataset = self._datasets[item.dataset]
        assert dataset is not None
        samples = {k: dataset[i] for k, i in zip(item.positions, item.indices, strict=True)}
        # Prompt i of this call is number i * replicas + replica of the batch.
        engine.replica, engine.replicas = item.positions.start, item.positions.step
        rollouts = self._generator.respond(samples, item.spec, item.seed)
        if self._queue is not None:
            version, seconds = engine.weight_version or 0, session.take_timings()
            without = [replace(r, sample=None) for r in rollouts]  # type: ignore[arg-type]
            self._queue.send(item, without, version, seconds)


def _with_own_share_of_cores(config: GRPOConfig) -> GRPOConfig:
    """Return the configuration with as many reward workers as this rank's share of the cores."""
    trainer, rollout = config.trainer, config.rollout
    ranks = trainer.n_gpus_per_node + rollout.n_gpus_per_node
    workers = config.reward.num_workers or max(1, len(os.sched_getaffinity(0)) // ranks)
    return replace(config, reward=replace(config.reward, num_workers=workers))
