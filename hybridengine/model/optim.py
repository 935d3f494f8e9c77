"""AdamW over FSDP2 shards, learning-rate schedules and the true global gradient norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from hybridengine.model.errors import ModelError

__all__ = ["SCHEDULES", "build_adamw", "build_schedule", "clip_grad_norm_"]

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def build_adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> torch.optim.AdamW:
    """Fused AdamW on the float32 shards; as in verl, decay falls on every parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
    )


def build_schedule(
    optimizer: torch.optim.Optimizer, name: str, *, warmup_steps: int, total_steps: int
) -> LRScheduler:
    """Linear warm-up from 0, then `name`: constant, or linear or cosine decay to 0."""
    if name not in SCHEDULES:
        raise ModelError(f"lr_scheduler_type {name!r} is unknown; choose from {sorted(SCHEDULES)}")
    return get_scheduler(
        SCHEDULES[name], optimizer, num_warmup_steps=warmup_steps, num_training_steps=total_steps
    )


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients to a global L2 norm of at most `max_norm`; returns the norm before.

    The norm, float32 scalar, is that of the whole model's gradient and equal on all ranks: one
    all-reduce per group of ranks that shares shards. A norm that is not finite leaves the
    gradients alone, so that the caller can drop the step.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    by_group: dict[tuple[str, ...], list[torch.Tensor]] = {}
    groups: dict[tuple[str, ...], list[dist.ProcessGroup]] = {}
    for grad in grads:
        shared = _sharding_groups(grad)
        key = tuple(group.group_name for group in shared)
        groups[key] = shared
        by_group.setdefault(key, []).append(_local(grad))
    total = torch.zeros((), dtype=torch.float64, device=_local(grads[0]).device if grads else None)
    for key, local in by_group.items():
        norms = torch.stack(torch._foreach_norm(local, 2, dtype=torch.float32))
        squares = norms.double().square().sum()
        for group in groups[key]:
            dist.all_reduce(squares, group=group)
        total += squares
    norm = total.sqrt().float()
    scale = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    for local in by_group.values():
        torch._foreach_mul_(local, scale)
    return norm


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _sharding_groups(grad: torch.Tensor) -> list[dist.ProcessGroup]:
    """The groups over which `grad` is split; replicas are not counted twice."""
    if not isinstance(grad, DTensor):
        return []
    return [
        grad.device_mesh.get_group(dim)
        for dim, placement in enumerate(grad.placements)
        if isinstance(placement, Shard)
    ]
