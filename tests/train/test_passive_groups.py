"""Groups whose advantages are all 0 are computed without gradient, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.tensors import whole
from tests.tiny_models import save_tiny
from tests.train.rollout_cases import make_rollouts, share

pytestmark = pytest.mark.multirank

Passes = list[tuple[bool, bool]]  # (has a gradient, is a dummy)


def body(
    rank: int, world_size: int, path: str, budget: int, passive: dict[int, list[int]]
) -> tuple[list[tuple[list[torch.Tensor], dict[str, float], torch.Tensor]], Passes]:
    """(gradients, metrics, log-probs) of an update whose groups stay together, and of one that
    divides them; the passes of the latter.

    passive: by rank, its groups without advantage, counted among those that it has.
    """
    from hybridengine.model import Optimizer, sharding_mesh
    from hybridengine.model.exact import use_exact_operators
    from hybridengine.run.config import RLConfig
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.batch import DataParallel
    from hybridengine.train.models import Actor

    model = load_sharded(
        path,
        sharding_mesh("cpu", world_size),
        torch.float32,
        adapt=partial(use_exact_operators, splits={}),
    )
    gradients: list[torch.Tensor] = []

    class Recording(Optimizer):
        def step(self, max_norm: float) -> torch.Tensor:
            gradients[:] = [whole(p.grad).clone() for p in model.parameters()]
            return super().step(max_norm)

    optimizer = Recording(model, lr=0.0, total_steps=1)
    dp = DataParallel(Session(PhaseStatus(Path(path) / "run", rank)), 1, shared_prefix=True)
    actor = Actor(RLConfig(), model, None, optimizer, dp)
    prompts, responses, advantages = make_rollouts(101)
    batch = dp.build_batch(share(prompts, responses, rank, world_size), 1, budget)
    own = torch.cat([advantages[i] + 0.25 for i in batch.index.tolist()])  # none is 0
    groups = batch.outcomes.groups[batch.index]
    here = groups.unique()[passive.get(rank, [])]
    own[torch.isin(groups, here)[batch.sequence_ids]] = 0
    batch = replace(batch, advantages=own)
    results, passes = [], Passes()
    for divide in (lambda batch, _: batch, dp.divide):

        def noting(given: Any, is_active: Any, divide: Any = divide) -> Any:
            divided = divide(given, is_active)
            passes[:] = [(m.has_gradient, m.is_dummy) for m in divided.micro_batches]
            return divided

        dp.divide = noting  # type: ignore[method-assign]
        updated, metrics = actor.update(batch)
        assert updated.old_log_probs is not None
        results.append(([*gradients], metrics, updated.old_log_probs))
    return results, passes


def check(results: Any) -> None:
    (gradients, metrics, log_probs), (divided, own_metrics, own_log_probs) = results
    assert own_log_probs.equal(log_probs)
    for got, expected in zip(divided, gradients, strict=True):
        # float32 sums in another order
        assert (got - expected).abs().max() <= 2e-6 * expected.abs().max()
    for name, value in metrics.items():
        assert own_metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


PASSIVE, ACTIVE, DUMMY = (False, False), (True, False), (True, True)


def test_one_rank(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    cases = {  # groups without advantage among six → passes
        (1, 3): [PASSIVE, ACTIVE],
        (): [ACTIVE],
        tuple(range(6)): [PASSIVE, DUMMY],
    }
    for groups, passes in cases.items():
        [(results, made)] = run_ranks(body, 1, path, 10_000, {0: [*groups]})
        check(results)
        assert made == passes, groups
        if len(groups) == 6:
            assert not any(gradient.any() for gradient in results[1][0])
    [(results, made)] = run_ranks(body, 1, path, 30, {0: [0, 1, 2, 4]})
    check(results)
    assert made.count(ACTIVE) + made.count(DUMMY) > 1 and PASSIVE in made, "micro-batches"


def test_ranks_divide_together(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    for passive in ({0: [0], 1: [1]}, {0: [0, 1, 2], 1: [0]}, {0: [0, 1, 2]}):
        for results, made in run_ranks(body, 2, path, 10_000, passive):
            check(results)
            assert len(made) == len(passive), "all ranks wait for one without such groups"
