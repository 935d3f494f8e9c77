"""Jobs on trainer ranks and engine ranks, one after another on the same processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier

from tests.extras.agents.turns import TURN_LOOP, TURN_TOOLS
from tests.ranks import run_ranks
from tests.train.in_process import Result, result_of

__all__ = ["MULTI_TURN", "overrides_of", "run_named", "run_overlapped", "update_inside_items"]

MULTI_TURN = (
    "rollout.multi_turn.enable=true",
    "rollout.multi_turn.max_assistant_turns=2",
    "rollout.multi_turn.function_tool_path={dir}/turn_tools.py",
    "rollout.agent.default_agent_loop={dir}/turn_loop.py:Loop",
    "data.max_response_length=20",
)


def overrides_of(folder: Path, base: Sequence[str], name: str, more: Sequence[str]) -> list[str]:
    """Return the overrides of a job that writes to folder / name; {dir} in them is `folder`."""
    given = (*base, f"trainer.default_local_dir={folder / name}", *more)
    pairs = dict(override.format(dir=folder).split("=", 1) for override in given)
    return [f"{key}={value}" for key, value in pairs.items()]


def run_named(
    folder: Path, base: Sequence[str], jobs: Mapping[str, Sequence[str]], num_ranks: int
) -> dict[str, Result]:
    """Run jobs, given by their overrides of `base`, by name; all must succeed."""
    (folder / "turn_loop.py").write_text(TURN_LOOP)
    (folder / "turn_tools.py").write_text(TURN_TOOLS)
    overrides = [overrides_of(folder, base, name, more) for name, more in jobs.items()]
    results = run_overlapped(folder, overrides, num_ranks)
    assert [result.refused for result in results] == [""] * len(jobs)
    return dict(zip(jobs, results, strict=True))


def run_overlapped(
    folder: Path,
    jobs: Sequence[Sequence[str]],
    num_ranks: int,
    timeout_s: float = 400.0,
    before: Callable[[], object] | None = None,
) -> list[Result]:
    """Run jobs, each given by its overrides, on `num_ranks` ranks of both roles in all.

    A job that sets trainer.mode has them all; any other trains on the first ranks alone. before:
    called on every rank.
    """
    return run_ranks(run_jobs, num_ranks, folder, jobs, before, timeout_s=timeout_s)[0]


def update_inside_items(
    begin: Callable[[], object], has_begun: Callable[[], bool], end: Callable[[], object]
) -> None:
    """On an engine's rank: each update comes inside the first item of a batch, not of the first.

    A batch is two items; what comes before the item is all that the trainer rank needs for the
    update. begin: called before the item; has_begun: asked before each step, until it is time to
    wait for the update; end: called when this is there.
    """
    from hybridengine.engine.interface import InFlightUpdate
    from hybridengine.remote.messages import wait_until
    from hybridengine.remote.overlap import worker

    generate = worker.RolloutWorker.generate
    choose = worker.RolloutWorker.choose_on_first_rank
    is_awaited = False

    def generate_item(self: Any, item: Any) -> None:
        nonlocal is_awaited
        is_awaited = bool(self._engine.in_flight) and item.number >= 2 and item.number % 2 == 0
        if is_awaited:
            begin()
        generate(self, item)

    def waiting(is_due: Callable[[], bool], update: Any, keep_kv: bool) -> InFlightUpdate:
        def waits() -> bool:
            nonlocal is_awaited
            if not is_awaited or not has_begun():
                return False
            wait_until(lambda: is_due() or None, 60, "an update")
            is_awaited = False
            end()
            return True

        return InFlightUpdate(waits, update, keep_kv)

    def choose_items_first(self: Any, queue: Any, pending: bool) -> Any:
        """An update that comes early waits for the item that is to take it."""
        item, version = queue.peek(), self._engine.weight_version
        can_run = item is not None and version is not None and item.min_version <= version
        return choose(self, queue, pending and not can_run)

    worker.InFlightUpdate = waiting  # type: ignore[misc, assignment]
    worker.RolloutWorker.generate = generate_item  # type: ignore[method-assign]
    worker.RolloutWorker.choose_on_first_rank = choose_items_first  # type: ignore[method-assign]


def run_jobs(
    rank: int,
    num_ranks: int,
    folder: Path,
    jobs: Sequence[Sequence[str]],
    before: Callable[[], object] | None = None,
) -> list[Result]:
    from hybridengine.run import failures
    from hybridengine.run.config import load_config
    from hybridengine.run.rank import connect_store
    from hybridengine.train import report
    from hybridengine.train.rl import RLTrainer

    report.plugins = lambda group: {}
    if before:
        before()
    environment, results = dict(os.environ), list[Any]()
    dist.barrier()
    dist.destroy_process_group()
    store = connect_store(timeout_s=60)
    for number, overrides in enumerate(jobs):
        # A rank that skips a job must not ask for a number while the start of that job is counted.
        barrier(store, num_ranks, f"tests/job_{number}")
        config = load_config(None, overrides)
        ranks = config.ranks_per_node
        assert ranks <= num_ranks
        run = Path(config.trainer.default_local_dir)
        if rank < ranks:
            os.environ.update(environment, WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
            failures.guard_numbers = itertools.count()  # a rank that skipped a job has made fewer
            code = RLTrainer.run(config)
            if rank == 0:
                results.append(result_of(run, f"exit code {code}" if code else ""))
    return results
