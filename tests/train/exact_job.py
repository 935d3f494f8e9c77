"""A job with exact log-probs, whose passes are run twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hybridengine.run.config import load_config
from tests.tensors import part

__all__ = ["VLLM", "train"]

VLLM = ("rollout.name=vllm", "rollout.kv_cache_gib=0.01", "rollout.dtype=auto")


def train(rank: int, world_size: int, folder: Path, job: list[str]) -> tuple[int, list[bool]]:
    """Run the job; return how many decoding steps were replayed, and what has to be true.

    Of every parameter and optimizer step: the gradients of passes that are run twice are equal.
    """
    from hybridengine.kernels.graph import Graph
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.preflight import check_job
    from hybridengine.train.rl import RLTrainer

    config = load_config(None, job)
    check_job(config)
    run = RLTrainer(config, Session(PhaseStatus(folder / "run", rank)))
    actor, optimizer = run.actor, run.actor.optimizer
    loss_of, take = actor.micro_batch_loss, optimizer.step
    calls: list[Any] = []
    holds: list[bool] = []

    def recorded_loss(*micro_batch: Any) -> Any:
        calls.append(micro_batch)
        return loss_of(*micro_batch)

    def repeated_step(max_norm: float) -> Any:
        trained = [p for p in actor.model.parameters() if p.grad is not None]
        before = [part(p.grad).clone() for p in trained]
        for parameter in trained:
            parameter.grad = None
        for micro_batch in calls:
            loss, _, output = loss_of(*micro_batch)
            optimizer.observe_loss(loss, output)
            (loss * run.dp.grad_scale(optimizer)).backward()
        calls.clear()
        grads = [part(p.grad) for p in trained]
        holds.extend(torch.equal(x, y) for x, y in zip(before, grads, strict=True))
        return take(max_norm)

    with (
        patch.object(Graph, "replay", autospec=True, side_effect=Graph.replay) as replay,
        patch.object(actor, "micro_batch_loss", recorded_loss),
        patch.object(optimizer, "step", repeated_step),
    ):
        run.train()
    return replay.call_count, holds
