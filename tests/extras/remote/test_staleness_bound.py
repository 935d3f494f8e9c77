"""Rollouts that are too old are dropped and generated again; the split of a batch into items."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from hybridengine.api.settings import check_ranks
from hybridengine.engine.response import Response
from hybridengine.remote.overlap.queue import Finished, WorkItem
from hybridengine.remote.overlap.source import OverlappedRollouts
from hybridengine.remote.roles import Role, RoleLink, Roles
from hybridengine.run.config import ConfigError, load_config
from hybridengine.train.data import PromptLoader, PromptSample
from hybridengine.train.preflight import check_algorithm
from hybridengine.train.rewards.manager import Reward
from hybridengine.train.rollouts import ScoredResponse

NEEDED = ["model.path=m", "data.train_files=t.jsonl", "rollout.n_gpus_per_node=3"]


class Engines:
    """Engines that have finished an item when asked for it, with weights of `version`."""

    def __init__(self) -> None:
        self.items: dict[int, WorkItem] = {}
        self.version, self.received = 0, list[int]()
        self.late: set[int] = set()  # numbers of items that are not finished
        self.lost = False  # an engine has lost its weights
        self.synced: list[int] = []  # the versions of weights that were sent

    def submit(self, item: WorkItem) -> None:
        self.items[item.number] = item

    def finished(self, number: int) -> Finished | None:
        if number in self.late or number not in self.items:
            return None
        version = max(self.version, self.items[number].min_version)
        return Finished(number, 0, version, 1, {"gen": 3.0, "idle": 1.0})

    def wants_weights(self) -> bool:
        return self.lost

    def weights_follow(self) -> None:
        self.lost, self.late = False, set()

    def sync(self, version: int) -> Any:
        self.synced.append(version)

    def receive(self, result: Finished) -> list[ScoredResponse]:
        self.received.append(result.number)
        return [
            ScoredResponse(
                Response([5], [-1.0], "stop", [(result.version, 1)]), k, reward=Reward(0.5)
            )
            for k in self.items[result.number].positions
        ]


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def source_of(*overrides: str) -> tuple[OverlappedRollouts, Engines, PromptLoader]:
    from hybridengine.run.session import Session

    config = load_config(None, [*NEEDED, *overrides])
    rollout = config.rollout
    roles = Roles(1, 1, rollout.n_gpus_per_node, rollout.tensor_model_parallel_size)
    link = RoleLink(roles, Role("trainer", 0, 1, 1), dist.HashStore(), timeout_s=1.0)

    class Status:
        def enter(self, phase: str, step: int) -> None: ...

    session = Session(Status())  # type: ignore[arg-type]
    prompts: Any = [PromptSample(k, [k], f"{k}", "d", "", {}) for k in range(48)]
    loader = PromptLoader(prompts, config.data.train_batch_size, seed=1, shuffle=False)
    data: Any = SimpleNamespace(train=prompts, val=None, loader=loader)
    given: Any = SimpleNamespace(delta="off")  # the trainer's choices; its actor
    source, engines = OverlappedRollouts(config, given, session, link, data), Engines()
    module = "hybridengine.remote.overlap.source"
    with (
        patch(f"{module}.TrainerQueue", lambda link: engines),
        patch(f"{module}.build_sender", lambda *arguments: engines),
    ):
        source.connect(given, None)
    return source, engines, loader


ASYNC = ("trainer.mode=async", "data.train_batch_size=12", "rollout.max_num_seqs=16")


def test_too_old_rollouts_are_dropped_and_generated_again(world: None) -> None:
    source, engines, loader = source_of(
        *ASYNC, "trainer.staleness=1", "trainer.total_training_steps=4"
    )
    first = source.next_batch(1, 0)
    assert loader.in_flight == 1 and len(engines.items) == 12
    source.sync(1)
    source.sync(2)  # two updates: what version 0 has generated ahead is too old now
    engines.version = 0
    second = source.next_batch(2, 0)
    metrics = source.metrics(3, second)
    assert first.outcomes.versions.unique().tolist() == [0]
    assert second.outcomes.versions.unique().tolist() == [2]
    assert metrics["fully_async/count/dropped_stale_samples"] == 12
    assert metrics["fully_async/trajectory_staleness/max"] == 0
    assert metrics["rollouter/idle_ratio"] == 0.25
    expected = sorted(prompt.index for prompt in second.prompts)
    assert expected == list(range(12, 24))  # the prompts of the dropped ones
    assert len(set(engines.received)) == len(engines.received)  # no engine keeps a message


def test_an_engine_that_lost_its_weights_gets_them_again(world: None) -> None:
    modes = ("trainer.mode=one_step_off", "rollout.n_gpus_per_node=1", "trainer.staleness=1")
    steps = ("trainer.total_training_steps=3", "data.train_batch_size=12")
    source, engines, _ = source_of(*modes, *steps)
    source.sync(1)
    engines.version = 1
    engines.lost, engines.late = True, {0}  # it has the prompts, and no weights
    assert source.next_batch(2, 0).outcomes.versions.unique().tolist() == [1]
    assert engines.synced == [1, 1], "the weights of the last sync, once more"
    assert len(engines.items) == 2, "the next batch is generated ahead"
    engines.lost, engines.late = True, {1}
    source.sync(2)
    assert engines.synced == [1, 1, 2], "newer ones follow at once"


def test_async_takes_what_is_finished_first(world: None) -> None:
    source, engines, loader = source_of(
        *ASYNC, "trainer.staleness=1", "trainer.total_training_steps=3"
    )
    assert len({len(item.indices) for item in engines.items.values()}) <= 1
    engines.late = {0, 1}
    first = source.next_batch(1, 0)
    engines.late = set()
    taken = [prompt.index for prompt in first.prompts]
    assert taken == list(range(4, 16))  # items of two prompts; 0 and 1 wait for a later step
    assert [sample.index for sample, _ in first.with_prompts()] == taken
    second = [prompt.index for prompt in source.next_batch(2, 0).prompts]
    assert second == [0, 1, 2, 3, *range(16, 24)]
    third = source.next_batch(3, 0)
    assert loader.in_flight == 0 and sorted(engines.received) == sorted(engines.items)
    assert [prompt.index for prompt in third.prompts] == list(range(24, 36))


def test_one_step_off_waits_for_its_own_batch(world: None) -> None:
    settings = ("trainer.mode=one_step_off", "data.train_batch_size=4")
    source, engines, _ = source_of(*settings, "trainer.total_training_steps=2")
    rollouts = source.next_batch(1, 0)
    assert [list(item.positions) for item in engines.items.values()][:3] == [[0, 3], [1], [2]]
    assert [prompt.index for prompt in rollouts.prompts] == [0, 1, 2, 3]
    engines.late = {3}
    with pytest.raises(dist.DistError, match=r"timed out after 1 s .*4 of 4 prompts"):
        source.next_batch(2, 0)


def test_roles_of_the_ranks_of_two_machines() -> None:
    roles = Roles(2, trainers_per_node=1, engines_per_node=4, tp_size=2)
    found = [roles.role_of(rank) for rank in range(10)]
    assert [role.world for role in found] == [
        "trainer",
        "engine 0",
        "engine 0",
        "engine 1",
        "engine 1",
        "trainer",
        "engine 2",
        "engine 2",
        "engine 3",
        "engine 3",
    ]
    assert [role.rank for role in found] == [0, 0, 1, 0, 1, 1, 0, 1, 0, 1]
    assert {role.local_world_size for role in found if role.engine is None} == {1}
    wide = Roles(2, trainers_per_node=2, engines_per_node=1, tp_size=2)
    assert [wide.role_of(rank).engine for rank in range(6)] == [None, None, 0, None, None, 0]
    assert wide.role_of(5) == Role("engine", 1, 2, 1, 0)


def test_what_else_needs_the_newest_weights_or_trains_on_every_rank() -> None:
    config = load_config(None, [*NEEDED, "trainer.mode=async", "algorithm.adv_estimator=remax"])
    with pytest.raises(ConfigError, match="'remax', whose baseline is a greedy response of the"):
        check_algorithm(config)
    with pytest.raises(ConfigError, match=r"trainer.mode is async, but every process of a script"):
        check_ranks(config)
