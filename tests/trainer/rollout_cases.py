"""Rollouts of random tokens and lengths, without an engine."""

from __future__ import annotations

import torch

from hybridengine.data import PromptSample
from hybridengine.trainer.rollouts import Rollout

__all__ = ["make_rollouts"]


def make_rollouts(vocab: int, count: int = 11) -> tuple[list[Rollout], list[torch.Tensor]]:
    """Return `count` random rollouts, two to a group, and advantages, one tensor per rollout."""
    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(3, vocab, (n,), generator=generator).tolist()

    rollouts, advantages = [], []
    for i in range(count):
        prompt, response = ids(3 + i % 4), ids(1 + (5 * i) % 9)
        sample = PromptSample(i // 2, prompt, "", "test", "", {})
        log_probs = (-3 - torch.rand(len(response), generator=generator)).tolist()
        rollouts.append(
            Rollout(i // 2, sample, "", response, log_probs, float(i % 3), {}, "length")
        )
        advantages.append(torch.full((len(response),), (i % 5 - 2) / 2))
    return rollouts, advantages
