"""Names and times of phases, also of one inside another."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hybridengine.run import session


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_phase_inside_another_one_interrupts_it(
    world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, now = list[str](), 0.0
    monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter=lambda: now))

    class Status:
        def enter(self, phase: str, step: int) -> None:
            entered.append(phase)

    rank = session.Session(Status())  # type: ignore[arg-type]
    for _ in range(2):
        with rank.phase("gen"):
            now += 1
            with rank.phase("update_weights"):
                now += 10
            assert entered[-3:] == ["gen", "update_weights", "gen"]
            now += 2
    with rank.phase("idle"):
        now += 4
    assert entered[-2:] == ["gen", "idle"]
    assert rank.take_timings() == {"gen": 6, "update_weights": 20, "idle": 4}
    with rank.phase("step"):
        now += 1
        with rank.phase("gen"):
            now += 7
        with rank.phase("testing", absorbs=True):
            now += 100
            with rank.phase("gen"):
                now += 1000
    assert rank.take_timings() == {"step": 1, "gen": 7, "testing": 1100}


def test_a_step_that_begins_outside_a_phase_is_named_at_once(world: None) -> None:
    places = list[tuple[str, int]]()

    class Status:
        def enter(self, phase: str, step: int) -> None:
            places.append((phase, step))

    guard = SimpleNamespace(phase="")
    rank = session.Session(Status(), guard)  # type: ignore[arg-type]
    with rank.phase("wait_for_actor"):
        pass
    rank.step = 7
    assert places[-1] == ("wait_for_actor", 7) and rank.step == 7
    assert guard.phase == "phase 'wait_for_actor' of step 7"
