"""A run whose last updates were all skipped fails, whichever optimizer it is and wherever it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hybridengine.run.errors import EXIT_USER_ERROR
from hybridengine.train.checkpoint import find_checkpoints
from tests.extras.remote.overlapped import overrides_of
from tests.ranks import Ranks
from tests.train.in_process import small_job

pytestmark = pytest.mark.multirank

LIMIT_S = 240
STEPS = 3
GAE = ("algorithm.adv_estimator=gae",)
APART = ("critic.n_gpus_per_node=1",)
OVERLAPPED = ("trainer.mode=one_step_off", "rollout.n_gpus_per_node=1")
JOBS = {  # (ranks, the optimizer that fails, overrides)
    "grpo": (2, "actor", ("trainer.n_gpus_per_node=2",)),
    "overlapped": (2, "actor", OVERLAPPED),
    "policy": (1, "actor", GAE),
    "critic": (2, "critic", (*GAE, "trainer.n_gpus_per_node=2")),
    "critic_apart": (2, "critic", (*GAE, *APART)),
    "policy_apart": (2, "actor", (*GAE, *APART)),
}


def run_rank(rank: int, world_size: int, folder: Path, overrides: list[str], failing: str) -> int:
    """One rank of a job in which the loss of the optimizer `failing` is NaN from step 2 on.

    It is so on the last of its ranks alone, and for one of its micro-batches.
    """
    import torch.distributed as dist

    from hybridengine.run.config import load_config
    from hybridengine.train import report
    from hybridengine.train.models import Learner
    from hybridengine.train.rl import RLTrainer

    report.plugins = lambda group: {}
    dist.barrier()
    dist.destroy_process_group()
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"record_{rank}.json")
    step = Learner.take_step

    def diverging_step(self: Any, batch: Any, number: int) -> Any:
        session, loss_of = self._dp.session, self.micro_batch_loss
        is_last = session.rank == session.world_size - 1

        def micro_batch_loss(batch: Any, micro_batch: Any, *counts: Any) -> Any:
            loss, *rest = loss_of(batch, micro_batch, *counts)
            is_bad = is_last and micro_batch is batch.mini_batches[number][-1]
            return (loss * float("nan") if is_bad else loss, *rest)

        if self.name == failing and session.step >= 2:
            self.micro_batch_loss = micro_batch_loss
        return step(self, batch, number)

    Learner.take_step = diverging_step
    return RLTrainer.run(load_config(None, overrides))


LONG = ("policy", "policy_apart")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.exhaustive] * (kind in LONG)) for kind in JOBS],
)
def test_the_optimizer_that_failed_is_named(tmp_path: Path, kind: str) -> None:
    num_ranks, failing, more = JOBS[kind]
    more = (*more, f"trainer.total_training_steps={STEPS}", "rollout.n=2")
    overrides = overrides_of(tmp_path, small_job(tmp_path), "run", more)
    with Ranks(run_rank, num_ranks, tmp_path, overrides, failing, timeout_s=400) as ranks:
        assert (
            ranks.results_without(*range(1, num_ranks))[0] == EXIT_USER_ERROR
        )  # 1 of the launcher
    message = json.loads((tmp_path / "record_0.json").read_text())["message"]["message"]
    assert message.startswith(
        f"ModelError: the last 2 updates of {failing}, since step 2, were all skipped (the loss of "
        f"{failing} is nan), and its weights are those before that step; lower the learning rate"
    ), message
    run = tmp_path / "run"
    assert [c.step for c in find_checkpoints(run)] == [STEPS]
    assert f"`hybridengine export {run}/global_step_{STEPS} --out {run}/final`" in message
    assert not (run / "final").exists() and not (run / "summary.json").exists()
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    name = f"{failing}/skipped_updates"
    assert [row[name] for row in rows if name in row] == [0, 1, 1]
