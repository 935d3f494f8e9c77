"""Parameters after a step, and which of their elements changed."""

from __future__ import annotations

import torch

from hybridengine.sharding.changes import ChangedElements
from hybridengine.sharding.checksums import bit_checksums
from hybridengine.sharding.shards import local_shard


def train(full: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Full parameters after a step that changes the bits of some elements, and others by less."""
    generator = torch.Generator().manual_seed(seed)
    trained = {}
    for name, tensor in full.items():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        trained[name] = torch.where(chosen, tensor * 1.5 + 1, tensor * (1 + 1e-6))
    return trained


class Tracker:
    """The change sets that an optimizer would give of shards: what changed since the last call."""

    def __init__(self, shards: dict[str, torch.Tensor], untracked: tuple[str, ...] = ()) -> None:
        self.shards, self.untracked = shards, untracked
        self.before: dict[str, torch.Tensor] | None = None
        self.calls = 0

    def __call__(self) -> dict[str, ChangedElements] | None:
        self.calls += 1
        now = {n: local_shard(t).flatten().clone() for n, t in self.shards.items()}
        before, self.before = self.before, now
        if before is None:
            return None
        changes = {}
        for name in now.keys() - self.untracked:
            then, bits = before[name].bfloat16(), now[name].bfloat16()
            indices = (bits != then).nonzero()[:, 0].int()
            states = bit_checksums([before[name], now[name]])
            changes[name] = ChangedElements(indices, bits[indices], *states)
        return changes
