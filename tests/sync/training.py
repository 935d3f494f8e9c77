"""Parameters after a step."""

from __future__ import annotations

import torch


def train(full: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Full parameters after a step that changes the bits of some elements, and others by less."""
    generator = torch.Generator().manual_seed(seed)
    trained = {}
    for name, tensor in full.items():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        trained[name] = torch.where(chosen, tensor * 1.5 + 1, tensor * (1 + 1e-6))
    return trained
