"""Rollouts of random tokens and lengths, without an engine."""

from __future__ import annotations

import torch

from hybridengine.data import PromptSample, Subset
from hybridengine.trainer.rollouts import Rollout, Rollouts

__all__ = ["make_rollouts", "share"]


def make_rollouts(vocab: int, count: int = 11) -> tuple[list[Rollout], list[torch.Tensor]]:
    """Return `count` random rollouts, two to a group, and advantages, one tensor per rollout."""
    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(3, vocab, (n,), generator=generator).tolist()

    rollouts, advantages = [], []
    for i in range(count):
        if i % 2 == 0:
            sample = PromptSample(i // 2, ids(3 + i // 2 % 4), "", "test", "", {})
        response = ids(1 + (5 * i) % 9)
        log_probs = (-3 - torch.rand(len(response), generator=generator)).tolist()
        rollouts.append(
            Rollout(i // 2, "", response, log_probs, float(i % 3), {}, "length", sample=sample)
        )
        advantages.append(torch.full((len(response),), (i % 5 - 2) / 2))
    return rollouts, advantages


def share(rollouts: list[Rollout], rank: int, world_size: int) -> Rollouts:
    """What rank `rank` has of them, its groups dealt out as a generator does. Collective."""
    prompts = list({r.group: r.sample for r in rollouts}.values())
    own = [r for r in rollouts if r.group % world_size == rank]
    return Rollouts.gather(Subset(prompts, range(len(prompts))), own, rank)
