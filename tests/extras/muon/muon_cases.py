"""A model with every kind of parameter, its gradients, and torch's optimizers as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hybridengine.model import Optimizer

LR, DECAY = 1e-2, 0.1
# With it, and gradients of few bits, momentum is exact: shards are then orthogonalized bit by bit
# as full matrices, though an operation may treat the last elements of a shard otherwise.
MOMENTUM = 0.5


class Small(nn.Module):
    """Rows that no number of ranks divides, experts, and what AdamW updates."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.wide, self.tall = nn.Linear(12, 7, bias=False), nn.Linear(4, 13)
        self.square, self.again = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.norm, self.conv = nn.LayerNorm(5), nn.Conv1d(4, 4, 3)
        self.experts = nn.Parameter(torch.randn(6, 5, 8))
        self.value = nn.Linear(8, 1)
        self.kept = nn.Linear(3, 3, bias=False).requires_grad_(False)


MATRICES = ("wide.weight", "tall.weight", "square.weight", "again.weight", "experts")


def small() -> Small:
    torch.manual_seed(5)
    return Small()


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Return full gradients of few bits; `again` has none in the first step."""
    generator = torch.Generator().manual_seed(step)
    found = {
        name: torch.randint(-8, 9, p.shape, generator=generator) / 8
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    if step == 0:
        del found["again.weight"]
    return found


def optimizer_of(model: nn.Module, **options: Any) -> Optimizer:
    options = {"momentum": MOMENTUM} | options
    return Optimizer(model, lr=LR, weight_decay=DECAY, total_steps=99, name="muon", options=options)


def set_gradients(model: nn.Module, full: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        gradient = full.get(name)
        if gradient is not None and isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def train(model: nn.Module, optimizer: Optimizer, steps: range, max_norm: float = 1e9) -> None:
    for step in steps:
        set_gradients(model, gradients(small(), step))
        optimizer.step(max_norm)


def trained_by_torch(
    num_steps: int, adjust_lr_fn: str, nesterov: bool, clip: Callable[[Any], Any] = lambda p: None
) -> dict[str, torch.Tensor]:
    """Return the parameters after steps of torch.optim.Muon and AdamW on full parameters."""
    model = small()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    experts = [nn.Parameter(x) for x in model.experts.detach().unbind()]  # views
    matrices = [*(named[n] for n in MATRICES if n != "experts"), *experts]
    muon = torch.optim.Muon(
        matrices, LR, DECAY, MOMENTUM, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn
    )
    rest = [p for n, p in named.items() if n not in MATRICES]
    adamw = torch.optim.AdamW(rest, LR, weight_decay=DECAY, fused=True)
    for step in range(num_steps):
        set_gradients(model, gradients(model, step))
        clip(named.values())
        for expert, grad in zip(experts, model.experts.grad, strict=True):
            expert.grad = grad
        muon.step()
        adamw.step()
    return {name: p.detach() for name, p in model.named_parameters()}
