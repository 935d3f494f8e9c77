"""bypass_mode: the engine's log-probs are the old ones; losses equal plain formulas of verl's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridengine.run.config import RLConfig
from hybridengine.run.config.rl import AlgorithmConfig, RolloutCorrectionConfig
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.train.loss_forms_shared import Setup

pytestmark = pytest.mark.multirank  # one rank, for FSDP2
CASES = (
    RolloutCorrectionConfig(bypass_mode=True),
    RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k2", rollout_rs_threshold=0.02),
    RolloutCorrectionConfig(None, bypass_mode=True, loss_type="reinforce"),
    RolloutCorrectionConfig("token", 1.2, bypass_mode=True, loss_type="reinforce"),
    RolloutCorrectionConfig(
        "sequence", 1.5, "token_k2", 0.02, bypass_mode=True, loss_type="reinforce"
    ),
    RolloutCorrectionConfig("token", 1.2, None, None, True, True, "reinforce"),
    RolloutCorrectionConfig("sequence", 1.5, None, None, True, True, "reinforce"),
    RolloutCorrectionConfig("sequence_mean", 1.1, None, None, True, True, "reinforce"),
)


def expected_loss(batch, own, options) -> torch.Tensor:
    log_rho, mask = own - batch.rollout_log_probs, batch.response_mask
    kept = mask & (0.5 * log_rho.square() <= 0.02) if options.rollout_rs else mask
    advantages = batch.advantages
    if options.loss_type == "ppo_clip":
        ratio = log_rho.exp()
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * 3.0), loss)
    else:
        weights = torch.ones_like(own)
        if options.rollout_is != "token":
            counts = batch.sequence_sums(mask.float()).clamp(min=1)
            counts = counts if options.rollout_is == "sequence_mean" else torch.ones_like(counts)
            log_rho = (batch.sequence_sums(log_rho * mask) / counts)[batch.sequence_ids]
        if options.rollout_is:
            weights = log_rho.exp().clamp(max=options.rollout_is_threshold)
        if options.rollout_is_batch_normalize and options.rollout_is == "token":
            weights = weights / weights[mask].mean()
        elif options.rollout_is_batch_normalize:
            sequences = [batch.sequence_ids == i for i in range(len(batch.index))]
            means = [weights[mask & s].mean() for s in sequences if (mask & s).any()]
            weights = weights / torch.stack(means).mean()
        loss = -advantages * own * weights
    return (loss * kept).sum() / mask.sum()


def compare(rank: int, world_size: int, path: str) -> list[tuple[float, float]]:
    setup, results = Setup(rank, world_size, path), []
    for options in CASES:
        config = RLConfig(algorithm=AlgorithmConfig(rollout_correction=options))
        actor = setup.actor(config)
        own = actor.old_log_probs(setup.batch)
        batch = replace(setup.batch, old_log_probs=setup.batch.rollout_log_probs)
        _, metrics = actor.update(batch)
        results.append((metrics["actor/pg_loss"], float(expected_loss(batch, own, options))))
    return results


def test_losses_equal_plain_formulas(tmp_path: Path) -> None:
    [results] = run_ranks(compare, 1, save_tiny("llama", tmp_path / "model"), timeout_s=200)
    for options, (loss, expected) in zip(CASES, results, strict=True):
        assert loss == pytest.approx(expected, rel=1e-4, abs=1e-6), options
