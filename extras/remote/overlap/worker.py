"""One rank of an engine that generates for the trainer ranks: take weights, generate, send."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from hybridengine.engine.interface import InFlightUpdate, RolloutEngine
from hybridengine.model.stored import inner_names
from hybridengine.model.validation import config_of, long_rope_limit
from hybridengine.remote.messages import wait_until
from hybridengine.remote.overlap.queue import EngineQueue, WorkItem, report_signal
from hybridengine.remote.roles import SYNC_SHARE, RoleLink
from hybridengine.remote.servers import (
    NoServerError,
    ServerEngine,
    ServerPool,
    ServerReceiver,
    TrainersStore,
    VllmServer,
)
from hybridengine.remote.servers.client import address_for
from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.run.config import RLConfig
from hybridengine.run.session import Session
from hybridengine.train.build import (
    build_engine,
    find_stop_token_ids,
    import_external,
    load_data,
)
from hybridengine.train.choices import agree
from hybridengine.train.rollout_source import RolloutGenerator, WeightsChecksum
from hybridengine.vision.checks import find_conflicts, load_preparer

Action = WorkItem | Literal["update", "end"]


class RolloutWorker:
    """One rank of one engine.

    The first rank of an engine chooses what to do next, and the others follow it. New weights are
    taken where the next item needs them, where there is no item, in `async` before every item, and
    with `rollout.in_flight_update` while items run.
    """

    def __init__(self, config: RLConfig, session: Session, link: RoleLink) -> None:
        import_external(config)
        config, choices = agree(config)
        self._session, self._link = session, link
        self._eager = config.trainer.mode == "async"
        torch.manual_seed(config.seed)
        with session.phase("load_data"):
            data = load_data(_with_own_share_of_cores(config))
            tokenizer, self._datasets = data.tokenizer, {"train": data.train, "val": data.val}
        self._engine: RolloutEngine
        self._receiver: WeightReceiver | ServerReceiver
        with session.phase("start_engine"):
            if config.rollout.servers:
                connected = connect_servers(config, tokenizer, self._link, exact=choices.exact)
                self._engine, self._receiver = connected
            else:
                self._engine = build_engine(config, tokenizer, choices.engine, exact=choices.exact)
        engine = self._engine
        held = engine.pool.weights if isinstance(engine, ServerEngine) else None
        self._checksum = WeightsChecksum(config, engine, held)
        self._generator = RolloutGenerator(
            engine, tokenizer, data.reward, session, None, data.agents, self._checksum
        )
        if not config.rollout.servers:
            with session.phase("plan_reshard"):
                self._receiver = build_receiver(self._engine, self._link)
        if (in_flight := config.rollout.in_flight_update) != "off":
            is_due, keep_kv = self._receiver.pending, in_flight == "keep_kv"
            self._engine.in_flight = InFlightUpdate(is_due, self.update, keep_kv)
        self._queue: EngineQueue | None = None
        if self._engine.tp_rank == 0:
            with session.phase("connect_roles"):
                self._queue = EngineQueue(self._link)
        session.take_timings()

    def run(self) -> None:
        """Work until the trainer ranks need no more rollouts; they may still have to save."""
        while (action := self._next_action()) != "end":
            if isinstance(action, WorkItem):
                self.generate(action)
            else:
                self.update()
        self._engine.shutdown()
        if self._queue is not None:
            self._queue.confirm_end()

    def update(self) -> None:
        with self._session.phase("update_weights"):
            self._checksum.before_sync()
            self._receiver.receive()
            self._checksum.after_sync(self._receiver.engine_state)
        self._session.signals.can_wait = True  # as the trainer ranks, after the first sync

    def _next_action(self) -> Action:
        """Wait for the next action, the same on every rank of the engine. Collective over them."""
        with self._session.phase("idle"):
            timeout_s, what = self._link.timeout_s, "work from the trainer ranks"
            return wait_until(self._choose, timeout_s, what, self._link.is_writing)

    def _choose(self) -> Action | None:
        """Choose what to do next, None while there is nothing. Collective."""
        if number := self._session.signals.requested:
            report_signal(self._link, number)
        pending, action = self._receiver.pending(), None
        if self._queue is not None:
            action = self.choose_on_first_rank(self._queue, pending)
        return self._engine.broadcast(action, Action | None)

    def choose_on_first_rank(self, queue: EngineQueue, pending: bool) -> Action | None:
        queue.release()
        if queue.is_ended():
            return "end"
        item, version = queue.peek(), self._engine.weight_version
        can_run = item is not None and version is not None and item.min_version <= version
        if pending and (self._eager or not can_run):
            return "update"
        if can_run:
            queue.pop()
            return item
        if self._engine.wants_weights and not pending:
            queue.request_weights()
        return None

    def generate(self, item: WorkItem) -> None:
        session, engine = self._session, self._engine
        session.step = item.batch
        dataset = self._datasets[item.dataset]
        assert dataset is not None
        samples = {k: dataset[i] for k, i in zip(item.positions, item.indices, strict=True)}
        # Prompt i of this call is number i * replicas + replica of the batch.
        engine.replica, engine.replicas = item.positions.start, item.positions.step
        try:
            responses = self._generator.respond(samples, item.spec, item.seed)
        except NoServerError as error:
            warnings.warn(f"{error}; its prompts are generated again", RuntimeWarning, stacklevel=2)
            assert self._queue is not None
            self._queue.put_back(item)
            return
        if self._queue is not None:
            version, seconds = min(r.response.version for r in responses), session.take_timings()
            self._queue.send(item, responses, version, seconds)


def _with_own_share_of_cores(config: RLConfig) -> RLConfig:
    """Return the configuration with as many reward workers as this rank's share of the cores."""
    workers = config.reward.num_workers or max(
        1, len(os.sched_getaffinity(0)) // config.ranks_per_node
    )
    return replace(config, reward=replace(config.reward, num_workers=workers))


def connect_servers(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase, link: RoleLink, *, exact: bool
) -> tuple[ServerEngine, ServerReceiver]:
    """Return this rank's share of `rollout.servers` as an engine, and what updates its weights.

    exact: whether they must have the operators of the trained model. Waits until they have started.
    Raises RolloutError where one cannot be used or does not come.
    """
    rollout, number = config.rollout, link.role.engine
    servers = [VllmServer(url, i, link.timeout_s) for i, url in enumerate(rollout.servers)]
    servers = servers[number :: link.roles.num_engines]
    limit_s = SYNC_SHARE * link.timeout_s
    model = config_of(config.model)
    limit, is_inner = long_rope_limit(model), bool(inner_names(config.model.path, model))

    def join(server: VllmServer) -> None:
        server.check_settings(config.max_model_len, limit, is_inner, rollout.min_p > 0)
        if exact:
            server.check_exact(config.actor.fsdp_config.dtype)
        host, port = address_for(server.host, link.address)
        store = TrainersStore(host, port, f"{link.store.name}/weights", limit_s)
        server.join(store, config.replays_sampling)

    most = rollout.max_num_seqs
    pool = ServerPool(servers, join, max_sequences=most, timeout_s=limit_s)
    engine = ServerEngine(
        pool,
        stop_token_ids=find_stop_token_ids(config.model.path, tokenizer),
        max_sequences=most * len(servers),
        vocab_size=model.get_text_config().vocab_size,
        preparer=None if find_conflicts(config) else load_preparer(config),
    )
    return engine, ServerReceiver(pool, link.store.substore("weights"))


def build_receiver(engine: RolloutEngine, link: RoleLink) -> WeightReceiver:
    """Build an engine rank's side of the weight sync."""
    assert link.role.engine is not None
    store = link.store.substore("weights")
    timeout_s = SYNC_SHARE * link.timeout_s
    return WeightReceiver(engine, store, index=link.role.engine, timeout_s=timeout_s)
