"""AdamW over FSDP2 shards, learning-rate schedules and the true global gradient norm."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from hybridengine.errors import ModelError
from hybridengine.model.offload import Parking
from hybridengine.sharding.adapter import gathered
from hybridengine.sharding.shards import local_shard

__all__ = ["SCHEDULES", "Optimizer", "clip_grad_norm_"]

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}

# Loss scale of float16: halved by gradients that overflow, doubled after so many that did not.
_FIRST_LOSS_SCALE = 2.0**16
_GROWTH_INTERVAL = 400


class Optimizer:
    """Fused AdamW with its schedule; as in verl, weight decay falls on every parameter.

    schedule: linear warm-up from 0 over `warmup_steps`, then constant, or linear or cosine decay to
    0 at `total_steps`.

    skipped_in_a_row: updates skipped since the last one, for a gradient norm that was not finite;
    those that only lower the loss scale of float16 do not count.

    param_dtype: of the model's compute; float16 gradients need a loss multiplied by `loss_scale`,
    which is 1 otherwise. offload: Adam's moments are on the device during `step()` only; whoever
    else reads them does so inside `state.present()`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        schedule: str = "constant",
        warmup_steps: int = 0,
        total_steps: int,
        param_dtype: torch.dtype = torch.bfloat16,
        offload: bool = False,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ModelError(f"schedule {schedule!r} is unknown; choose from {sorted(SCHEDULES)}")
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters, self._names = list(named.values()), list(named)
        self.adamw = torch.optim.AdamW(
            self.parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )
        self.schedule: LRScheduler = get_scheduler(
            SCHEDULES[schedule],
            self.adamw,
            num_warmup_steps=warmup_steps,
            num_training_steps=total_steps,
        )
        self.last_lr = 0.0
        self._param_dtype = str(param_dtype).removeprefix("torch.")
        self._scaling = param_dtype == torch.float16
        self.loss_scale = _FIRST_LOSS_SCALE if self._scaling else 1.0
        self._steps_at_scale = 0
        self.skipped_in_a_row = 0
        self._skipped_norms: list[float] = []
        self.state = Parking(self._moments, offload)

    def _moments(self) -> Iterable[torch.Tensor]:
        states = self.adamw.state.values()
        return (x for state in states for x in state.values() if isinstance(x, torch.Tensor))

    def step(self, max_norm: float) -> torch.Tensor:
        """Clip, step, advance the schedule, drop the gradients; returns the norm before clipping.

        A gradient norm that is not finite skips the update, so that the weights survive it.
        """
        norm = clip_grad_norm_(self.parameters, max_norm, self.loss_scale)
        self.last_lr = float(self.schedule.get_last_lr()[0])
        finite = bool(norm.isfinite())
        if finite:
            with self.state.present():
                self.adamw.step()
            self.skipped_in_a_row = 0
        else:
            self._skipped_norms.append(float(norm))
            self.skipped_in_a_row += self.loss_scale <= 1
        if self._scaling:
            self._adapt_loss_scale(finite)
        self._advance()
        self.adamw.zero_grad(set_to_none=True)
        return norm

    def take_skipped(self) -> list[float]:
        """The gradient norms of the updates skipped since the last call."""
        norms, self._skipped_norms = self._skipped_norms, []
        return norms

    @torch.no_grad()
    def moments(self) -> dict[str, torch.Tensor]:
        """Adam's live state by `<parameter>/<kind>`, to save or to load into; zeros at first."""
        live = {}
        for name, parameter in zip(self._names, self.parameters, strict=True):
            state = self.adamw.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=local_shard(parameter).device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            live |= {f"{name}/{kind}": tensor for kind, tensor in state.items()}
        return live

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule and the loss scale are; the moments are tensors, see `moments`."""
        return {
            "param_dtype": self._param_dtype,
            "schedule_step": self.schedule.last_epoch,
            "loss_scale": self.loss_scale,
            "steps_at_scale": self._steps_at_scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("param_dtype", self._param_dtype) == self._param_dtype:  # else its first scale
            self.loss_scale = state["loss_scale"]
            self._steps_at_scale = int(state["steps_at_scale"])
        self.schedule.last_epoch = int(state["schedule_step"]) - 1
        self._advance()

    def _advance(self) -> None:
        with warnings.catch_warnings():  # a skipped first update is meant
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.schedule.step()

    def _adapt_loss_scale(self, finite: bool) -> None:
        self._steps_at_scale = self._steps_at_scale + 1 if finite else 0
        if not finite:
            self.loss_scale /= 2
        elif self._steps_at_scale % _GROWTH_INTERVAL == 0:
            self.loss_scale *= 2


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float, loss_scale: float = 1.0
) -> torch.Tensor:
    """Scale gradients to a global L2 norm of at most `max_norm`; returns the norm before.

    Gradients of a loss multiplied by `loss_scale` are divided by it first.

    The norm, float32 scalar, is that of the whole model's gradient and equal on all ranks. One that
    is not finite leaves the gradients alone, so that the caller can drop the step.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    kinds = ([g for g in grads if isinstance(g, DTensor) == sharded] for sharded in (True, False))
    norms = [gathered(torch.nn.utils.get_total_norm(kind)) for kind in kinds if kind]
    norm = torch.nn.utils.get_total_norm(norms) / loss_scale
    clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale = torch.where(norm.isfinite(), clip, 1.0) / loss_scale
    if grads:
        torch._foreach_mul_([local_shard(grad) for grad in grads], scale)
    return norm
