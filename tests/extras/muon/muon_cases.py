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
        self.experts = nn.Parameter(torch.randn(6, 4, 8))
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
    num_steps: int,
    adjust_lr_fn: str,
    nesterov: bool,
    clip: Callable[[Any], Any] = lambda p: None,
    split: Mapping[str, int] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the parameters after steps of torch.optim.Muon and AdamW on full parameters.

    split: parameter → rows of each of its matrices.
    """
    model, rows = small(), {"experts": 4} | dict(split or {})
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def blocks(name: str, x: torch.Tensor) -> list[torch.Tensor]:
        return [x] if name not in rows else list(x.view(-1, rows[name], x.shape[-1]))  # views

    parts = {n: [nn.Parameter(x) for x in blocks(n, named[n].detach())] for n in MATRICES}
    matrices = [matrix for some in parts.values() for matrix in some]
    muon = torch.optim.Muon(
        matrices, LR, DECAY, MOMENTUM, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn
    )
    rest = [p for n, p in named.items() if n not in MATRICES]
    adamw = torch.optim.AdamW(rest, LR, weight_decay=DECAY, fused=True)
    for step in range(num_steps):
        set_gradients(model, gradients(model, step))
        clip(named.values())
        for name, some in parts.items():
            if (full := named[name].grad) is not None:
                for matrix, grad in zip(some, blocks(name, full), strict=True):
                    matrix.grad = grad
        muon.step()
        adamw.step()
    return {name: p.detach() for name, p in model.named_parameters()}
