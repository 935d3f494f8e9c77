"""Rollouts of random tokens and lengths, without an engine."""

from __future__ import annotations

import torch

from hybridengine.engine.response import Response
from hybridengine.train.data import PromptSample, Subset
from hybridengine.train.rewards.manager import Reward
from hybridengine.train.rollouts import Rollouts, ScoredResponse

__all__ = ["make_rollouts", "share"]


def make_rollouts(
    vocab: int, count: int = 11
) -> tuple[list[PromptSample], list[ScoredResponse], list[torch.Tensor]]:
    """Return prompts, `count` random responses, two to a prompt, and an advantage per token."""
    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(3, vocab, (n,), generator=generator).tolist()

    prompts, responses, advantages = [], [], []
    for i in range(count):
        if i % 2 == 0:
            prompts.append(PromptSample(i // 2, ids(3 + i // 2 % 4), "", "test", "", {}))
        tokens = ids(1 + (5 * i) % 9)
        log_probs = (-3 - torch.rand(len(tokens), generator=generator)).tolist()
        response = Response(tokens, log_probs, "length")
        responses.append(ScoredResponse(response, i // 2, reward=Reward(float(i % 3))))
        advantages.append(torch.full((len(tokens),), (i % 5 - 2) / 2))
    return prompts, responses, advantages


def share(
    prompts: list[PromptSample], responses: list[ScoredResponse], rank: int, world_size: int
) -> Rollouts:
    """What rank `rank` has of them, its groups dealt out as a generator does. Collective."""
    own = [r for r in responses if r.group % world_size == rank]
    return Rollouts.gather(Subset(prompts, range(len(prompts))), own, rank)
