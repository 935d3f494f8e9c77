"""Rollouts from engine ranks, generated while the trainer ranks train.

`one_step_off`: while step k trains, every engine generates its part of batch k + 1 with the weights
of step k - 1, and takes those of step k when it is done. `async`: batches are cut into small items,
which free engines claim; an engine takes the newest weights before each item, or also during it,
and a step trains on the groups that are finished first. In both at most `trainer.staleness` batches
are ahead, and what has a token of weights that are more than that many updates old when it would be
trained on is dropped and generated again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch.distributed as dist
from transformers import PreTrainedModel

from hybridengine.engine.interface import SamplingSpec, derive_seed
from hybridengine.model import adapter_shards, frozen_parameters, parameter_shards
from hybridengine.remote.messages import wait_until
from hybridengine.remote.overlap.metrics import Utilisation, staleness_metrics
from hybridengine.remote.overlap.queue import Finished, TrainerQueue, WorkItem
from hybridengine.remote.roles import SYNC_SHARE, RoleLink
from hybridengine.remote.sync.records import EngineInfo, SyncStore
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.run.config import RLConfig
from hybridengine.run.messages import all_gather_values, broadcast_value
from hybridengine.run.session import Session
from hybridengine.sync.layout import EngineLayout
from hybridengine.sync.resharder import SyncReport
from hybridengine.sync.trainers import DeltaMode
from hybridengine.train.build import RunData
from hybridengine.train.choices import Choices
from hybridengine.train.data import PromptSample, Subset
from hybridengine.train.models import Actor
from hybridengine.train.rollout_source import (
    RolloutSource,
    Scorer,
    gather_rollouts,
    sampling_of,
)
from hybridengine.train.rollouts import Rollouts


class OverlappedRollouts(RolloutSource):
    """One trainer rank's view of the engine ranks.

    All trainer ranks know all items; rank 0 writes them, and decides which finished ones are taken.
    """

    def __init__(
        self, config: RLConfig, choices: Choices, session: Session, link: RoleLink, data: RunData
    ) -> None:
        self._config, self._choices = config, choices
        self._session, self._link = session, link
        self._train, self._val = data.train, data.val
        self._loader, self._sampling = data.loader, sampling_of(config)
        self.tp_size = link.roles.tp_size
        self._steps = config.trainer.steps(len(data.loader))
        self._version = 0  # of the newest weights that all engines have
        self._num_items = self._num_drawn = self._num_taken = 0  # items; batches
        self._open: dict[int, WorkItem] = {}  # training items that are handed out, in their order
        self._utilisation = Utilisation()

    def sliced_dims(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return {} unless log-probs are exact: then it waits for an engine that may slice."""
        slices = self.tp_size > 1 or self._config.rollout.servers
        if not (self._choices.exact and slices):
            return {}
        store = SyncStore(self._link.store.substore("weights"))
        with self._session.phase("connect_roles"):
            ready = partial(store.get, "engine/0", EngineInfo)
            info = wait_until(ready, self._link.timeout_s, "engine 0, which slices parameters")
        digests = info.layout_of_tp_rank
        self.tp_size = len(digests)
        return dict(store.read(f"layout/{digests[0]}", EngineLayout).sliced_dims(shapes))

    def connect(self, actor: Actor, reward_model: Scorer | None) -> None:
        self._reward_model = reward_model
        with self._session.phase("plan_reshard"):
            self._sender = build_sender(self._config, actor, self._choices.delta, self._link)
        with self._session.phase("connect_roles"):
            self._queue = TrainerQueue(self._link)

    def generate(self, prompts: Subset[PromptSample], spec: SamplingSpec, seed: int) -> Rollouts:
        items = {item.number: item for item in self._submit(prompts, spec, seed, self._version)}
        with self._session.phase("gen"):
            self._wait_for(items)
            results = [(item, self._finished(item)) for item in items.values()]
        return self._receive(results)

    def next_batch(self, step: int, number: int) -> Rollouts:
        self._utilisation.begin(number == 0)
        self._submit_ahead(step)
        with self._session.phase("gen"), self._utilisation.waiting():
            results = self._take()
        self._num_taken += 1
        self._loader.in_flight = self._num_drawn - self._num_taken
        return self._receive(results)

    def _submit_ahead(self, step: int) -> None:
        """Hand out the next batch, and as many further ones as may be ahead of `step`."""
        ahead = min(self._config.staleness, self._steps - step)
        while self._num_drawn <= self._num_taken + ahead:
            prompts = self._loader.next_batch()
            seed = derive_seed(self._config.seed, self._loader.num_batches, 0)
            # Behind by what the batches before it will add to the version.
            oldest = self._version + self._num_drawn - self._num_taken - self._config.staleness
            items = self._submit(prompts, self._sampling, seed, min(oldest, self._version))
            self._open |= {item.number: item for item in items}
            self._num_drawn += 1

    def _submit(
        self, prompts: Subset[PromptSample], spec: SamplingSpec, seed: int, min_version: int
    ) -> list[WorkItem]:
        """Hand out prompts as items."""
        is_train = prompts.dataset is self._train
        dataset: Literal["train", "val"] = "train" if is_train else "val"
        batch = self._loader.num_batches if is_train else self._version
        items = []
        for positions in self._split(len(prompts), is_train):
            number, self._num_items = self._num_items, self._num_items + 1
            indices = [prompts.indices[k] for k in positions]
            receiver = number % self._session.world_size
            item = WorkItem(
                number, batch, dataset, positions, indices, spec, seed, min_version, receiver
            )
            items.append(item)
            if self._session.is_main:
                self._queue.submit(item)
        return items

    def _split(self, num_prompts: int, is_train: bool) -> list[range]:
        """Return the positions of each item: an equal part for every engine, dealt out in turn as
        over replicas that also train; in `async` as many successive groups as an engine runs at
        once."""
        engines = min(self._link.roles.num_engines, num_prompts)
        if not is_train or self._config.trainer.mode != "async":
            return [range(engine, num_prompts, engines) for engine in range(engines)]
        rollout, roles = self._config.rollout, self._link.roles
        num_sequences = rollout.max_num_seqs * self._config.num_engines // roles.num_engines
        at_once = max(1, num_sequences // rollout.n)
        most = min(at_once, -(-num_prompts // (2 * engines)))
        size = max(n for n in range(1, most + 1) if num_prompts % n == 0)
        return [range(start, start + size) for start in range(0, num_prompts, size)]

    def _finished(self, item: WorkItem) -> Finished:
        """Return the announcement of an item that is finished, on every rank."""
        result = self._queue.finished(item.number) if self._session.is_main else None
        return broadcast_value(result, Finished)

    def _wait_for(self, items: Mapping[int, WorkItem], unless_lost: bool = False) -> None:
        """Wait until items are finished; unless_lost: or until an engine has lost its weights."""
        for number in items:
            what = f"the rollouts of item {number}"

            def look(number: int = number) -> list[Finished] | None:
                result = self._queue.finished(number)
                return None if result is None else [result]

            if self._wait(look, what, unless_lost) is None:
                return

    def _wait(
        self, look: Callable[[], list[Finished] | None], what: str, unless_lost: bool = False
    ) -> list[Finished] | None:
        """Return on every rank what `look` returns on rank 0, once it is not None. Collective.

        Engines that have lost their weights get them again meanwhile; unless_lost: return None.
        """

        def look_at_both() -> tuple[list[Finished] | None] | None:
            if (found := look()) is not None or self._queue.wants_weights():
                return (found,)
            return None

        while True:
            found: list[Finished] | None = None
            if self._session.is_main:
                (found,) = wait_until(look_at_both, self._link.timeout_s, what)
            found = broadcast_value(found, list[Finished] | None)
            if found is not None or unless_lost:
                return found
            self._send(self._version)

    def _send(self, version: int) -> SyncReport:
        if self._session.is_main:
            self._queue.weights_follow()
        return self._sender.sync(version)

    def _take(self) -> list[tuple[WorkItem, Finished]]:
        """Take items of one batch size that are not too old; drop and replace others."""
        oldest = self._version - self._config.staleness
        taken: list[tuple[WorkItem, Finished]] = []
        wanted = self._config.data.train_batch_size
        while missing := wanted - sum(len(item.indices) for item, _ in taken):
            for result in self._next_finished(missing):
                item = self._open.pop(result.number)
                self._utilisation.add(result)
                if result.version >= oldest:
                    taken.append((item, result))
                else:
                    self._replace(item, result)
        return taken

    def _next_finished(self, missing: int) -> list[Finished]:
        """Wait for the next items to take, of at most `missing` prompts."""
        in_order = self._config.trainer.mode != "async"
        if self._session.is_main:
            finished = [n for n in self._open if self._queue.finished(n) is not None]
            self._utilisation.ready(sum(len(self._open[n].indices) for n in finished))

        def look() -> list[Finished] | None:
            found: list[Finished] = []
            room = missing
            for number, item in self._open.items():
                result = self._queue.finished(number)
                if result is not None and len(item.indices) <= room:
                    found.append(result)
                    room -= len(item.indices)
                elif in_order:
                    break
            return found or None

        what = f"rollouts ({missing} of {self._config.data.train_batch_size} prompts are missing)"
        return self._wait(look, what) or []

    def _replace(self, item: WorkItem, result: Finished) -> None:
        """Drop rollouts that are too old, and hand out their prompts again, first of all."""
        if item.receiver == self._session.rank:
            self._queue.receive(result)
        number, self._num_items = self._num_items, self._num_items + 1
        again = replace(item, number=number, min_version=self._version)
        self._open = {number: again, **self._open}
        if self._session.is_main:
            self._queue.submit(again)
        self._utilisation.num_dropped += len(item.indices)

    def _receive(self, results: Sequence[tuple[WorkItem, Finished]]) -> Rollouts:
        """Receive this rank's items and gather the numbers of all, in the order of the batches."""
        rows = sorted(
            (item.batch, position, index, item.number)
            for item, _ in results
            for position, index in zip(item.positions, item.indices, strict=True)
        )
        group_of = {(number, position): g for g, (_, position, _, number) in enumerate(rows)}
        dataset = self._val if results[0][0].dataset == "val" else self._train
        assert dataset is not None
        prompts: Subset[PromptSample] = Subset(dataset, [index for _, _, index, _ in rows])
        own = []
        with self._session.phase("receive_rollouts"):
            for item, result in results:
                if item.receiver == self._session.rank:
                    for response in self._queue.receive(result):
                        group = group_of[item.number, response.group]
                        own.append(replace(response, group=group))
        own.sort(key=lambda r: r.group)  # stable
        return gather_rollouts(prompts, own, self._session, self._reward_model)

    def sync(self, version: int) -> SyncReport:
        if self._config.trainer.mode != "async":
            with self._session.phase("gen"), self._utilisation.waiting():
                self._wait_for(self._open, unless_lost=True)
        with self._session.phase("update_weights"), self._utilisation.waiting():
            report = self._send(version)
        self._version = version
        return report

    def metrics(self, step: int, rollouts: Rollouts) -> dict[str, float]:
        return staleness_metrics(step - 1, rollouts) | self._utilisation.end()

    def stop_signal(self) -> int:
        return self._queue.signal() if self._session.is_main else 0

    def describe(self) -> dict[str, str]:
        config = self._config
        kind = "vLLM servers" if config.rollout.servers else "engines"
        return {
            "overlap": f"{config.trainer.mode}, rollouts at most {config.staleness} updates old",
            "weight sync": f"from {self._session.world_size} trainer ranks into "
            f"{config.num_engines} {kind}",
        }

    def summary(self, last: SyncReport) -> dict[str, Any]:
        return {
            "tp_size": self.tp_size,
            "reshard_bytes_sent_by_last_sync_per_rank": all_gather_values(last.bytes_sent, int),
            **self._utilisation.summary(),
        }

    def end(self) -> None:
        if self._session.is_main:
            self._queue.end()

    def close(self) -> None:
        with self._session.phase("end_engines"):
            if self._session.is_main:
                self._queue.end()
                self._queue.wait_for_end()
            dist.barrier()


def build_sender(config: RLConfig, actor: Actor, delta: DeltaMode, link: RoleLink) -> WeightSender:
    """Build a trainer rank's side of the weight sync to engine ranks."""
    mib, model = config.reshard.bucket_mib, cast(PreTrainedModel, actor.model)
    return WeightSender(
        partial(parameter_shards, actor.model),
        link.store.substore("weights"),
        num_engines=config.num_engines,
        bucket_bytes=None if mib is None else mib << 20,
        adapters=partial(adapter_shards, actor.model),
        frozen=partial(frozen_parameters, actor.model),
        merge=config.reshard.lora == "merged",
        delta=delta,
        config=model.config.to_dict(),
        timeout_s=SYNC_SHARE * link.timeout_s,
    )
