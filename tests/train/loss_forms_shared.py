"""What the tests of loss forms share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridengine.run.config import RLConfig
from tests.loading import load_sharded
from tests.tensors import whole
from tests.train.rollout_cases import make_rollouts, share


class Setup:
    """A model on FSDP2 shards and a batch whose ratios, weights and mask are not trivial.

    Some advantages are 0: one pass leaves these tokens out of the gradient products.
    """

    def __init__(self, rank: int, world_size: int, path: str) -> None:
        from hybridengine.model import Optimizer, sharding_mesh
        from hybridengine.run.session import PhaseStatus, Session
        from hybridengine.train.batch import DataParallel

        session = Session(PhaseStatus(Path(path) / "run", rank))
        self.model = load_sharded(
            path,
            mesh=sharding_mesh("cpu", world_size),
            param_dtype=torch.float32,
        )
        self.optimizer = Optimizer(self.model, lr=0.0, total_steps=1)
        self.dp = DataParallel(session, 1)
        prompts, responses, advantages = make_rollouts(101)
        batch = self.dp.build_batch(share(prompts, responses, 0, 1), 1, 10_000)
        generator = torch.Generator().manual_seed(1)
        draw = lambda scale: scale * torch.randn(len(own), generator=generator)  # noqa: E731
        own = self.actor(RLConfig()).old_log_probs(batch)
        self.batch = replace(
            batch,
            advantages=torch.cat(advantages) * (draw(1.0) > -0.5),
            rollout_log_probs=own + draw(0.3),
            old_log_probs=own + draw(0.3),
            ref_log_probs=own + draw(0.3),
            selected=draw(1.0) > 0,
            response_mask=draw(1.0) > -1,
        )

    def actor(self, config: RLConfig, **changes: Any) -> Any:
        from hybridengine.train.models import Actor

        actor = Actor(config, self.model, None, self.optimizer, self.dp)
        for name, value in changes.items():
            setattr(actor, name, value)
        return actor

    def loss(self, actor: Any, own: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return [loss, log-probs, gradients ...] and metrics of the one micro-batch."""
        batch = self.batch
        if own:
            batch = replace(batch, old_log_probs=None)
        else:
            weights, mask, _ = actor.rollout_correction(batch)
            batch = replace(batch, is_weights=weights, response_mask=mask)
        [micro_batch] = actor.with_active_rows(batch).micro_batches
        self.model.zero_grad()  # before the forward, which gathers the parameters
        loss, metrics, log_probs = actor.micro_batch_loss(
            batch, micro_batch, *self.dp.num_trained(batch, 0)
        )
        (loss * self.dp.grad_scale(self.optimizer)).backward()
        mask = batch.mask_of(micro_batch)
        gradients = [whole(p.grad) for p in self.model.parameters()]
        scale = max(g.abs().max() for g in gradients)
        values = [loss.detach(), log_probs.detach() * mask, *(g / scale for g in gradients)]
        return values, metrics
