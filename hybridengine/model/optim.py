"""AdamW over FSDP2 shards, learning-rate schedules and the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers import get_scheduler

from hybridengine.model.fsdp import Offloader
from hybridengine.run import load_plugin
from hybridengine.run.errors import ModelError
from hybridengine.sync.shards import local_shard, with_shard

_SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}

# Loss scale of float16: halved by an overflow, doubled after this many steps without one.
INITIAL_LOSS_SCALE = 2.0**16
_GROWTH_INTERVAL = 400


@dataclass(frozen=True)
class SkippedUpdate:
    """An update that was not made.

    norm: of the gradients.
    loss: summed over all ranks; 0 where it was not observed.
    num_nonfinite: outputs of the model (log-probs, values) that are NaN or infinite.
    """

    norm: float
    loss: float
    num_nonfinite: int

    @property
    def is_overflow(self) -> bool:
        """Whether the gradients alone are not finite, as with a loss scale that is too large."""
        return math.isfinite(self.loss)


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW; other optimizers derive from it (`hybridengine.optimizers`).

    model: read by others.
    local: name → this rank's shard of each trained parameter.
    options: lr, betas, eps, weight_decay, and those of another optimizer.
    grad_scale: divides the gradients.
    found_inf: 1 for an update that must leave parameters and state as they are; None: 0.
    """

    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    def __init__(self, model: nn.Module, local: Mapping[str, nn.Parameter], **options: Any) -> None:
        super().__init__([*local.values()], fused=True, **options)

    def new_state(self, local: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return a parameter's state as the first update makes it."""
        moments = {key: torch.zeros_like(local) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=local.device), **moments}


class Optimizer:
    """AdamW, or another optimizer, with a learning-rate schedule.

    As in verl, all parameters have weight decay.

    name, options: of the optimizer; `adamw` or one of the group `hybridengine.optimizers`.

    schedule: linear warm-up from 0 over `warmup_steps`, then constant, or linear or cosine decay to
    `min_lr_ratio` of `lr` at `total_steps`.

    param_dtype: compute dtype of the model. With float16, multiply the loss by `loss_scale` (1
    otherwise) before backward.

    offload: keep Adam's moments on the device during `step()` only. To read them at another time,
    use `with optimizer.offloader.on_device()`.

    num_updates: updates up to now, skipped ones included.
    skipped_in_a_row: consecutive updates skipped because loss or gradient norm were not finite.
    failed_in_a_row: those of them that did not just lower the loss scale of float16.
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
        min_lr_ratio: float = 0.0,
        warmup_steps: int = 0,
        total_steps: int,
        param_dtype: torch.dtype = torch.bfloat16,
        offload: bool = False,
        name: str = "adamw",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if schedule not in _SCHEDULES:
            raise ModelError(f"schedule {schedule!r} is unknown; choose from {sorted(_SCHEDULES)}")
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self._named.values())
        # One update of plain tensors: of DTensors it takes nine times as long on the host.
        self._local = [nn.Parameter(local_shard(p.detach())) for p in self.parameters]
        self._groups = by_placement(self.parameters)
        kind = AdamW if name == "adamw" else load_plugin("optimizers", name, "optim.name")
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        local = dict(zip(self._named, self._local, strict=True))
        self.adamw: AdamW = kind(model, local, **given, **(options or {}))
        scheduler: Any = get_scheduler(
            _SCHEDULES[schedule],
            self.adamw,
            num_warmup_steps=warmup_steps,
            num_training_steps=total_steps,
        )
        # The factor alone: LRScheduler warns if the first update is skipped.
        self._lr_factor: Callable[[int], float] = scheduler.lr_lambdas[0]
        self._lr, self._min_lr_ratio, self._warmup_steps = lr, min_lr_ratio, warmup_steps
        self.num_updates = 0
        self.last_lr = 0.0
        self._param_dtype = str(param_dtype).removeprefix("torch.")
        self._scaling = param_dtype == torch.float16
        self.loss_scale = INITIAL_LOSS_SCALE if self._scaling else 1.0
        self._steps_at_scale = 0
        self.skipped_in_a_row = self.failed_in_a_row = 0
        self._skipped: list[SkippedUpdate] = []
        self._observed: torch.Tensor | None = None  # [loss, outputs that are not finite]
        self.offloader = Offloader(self.moment_tensors, offload)

    def moment_tensors(self) -> Iterable[torch.Tensor]:
        states = self.adamw.state.values()
        return (x for state in states for x in state.values() if isinstance(x, torch.Tensor))

    def observe_loss(self, loss: torch.Tensor, outputs: torch.Tensor | None = None) -> None:
        """Note this rank's part of the next update's loss; `step` skips one that is not finite.

        loss: 0-d, not multiplied by `loss_scale`.
        outputs: what the loss was computed from, to name the cause.
        All ranks observe losses, or none does.
        """
        count = loss.new_zeros(()) if outputs is None else (~outputs.isfinite()).sum()
        part = torch.stack([loss.detach().double(), count.double()])
        self._observed = part if self._observed is None else self._observed + part

    def _take_observed(self, norm: torch.Tensor) -> torch.Tensor:
        """Return [loss, outputs that are not finite] of this update over all ranks. Collective."""
        observed, self._observed = self._observed, None
        if observed is None:
            return norm.new_zeros(2, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(observed)
        return observed

    @torch.no_grad()
    def step(self, max_norm: float) -> torch.Tensor:
        """Clip, update, advance the schedule, clear the gradients; return the norm before clipping.

        An update whose gradient norm or observed loss is not finite is skipped: weights and moments
        stay unchanged. Collective. A device is waited for once, after its work has been queued.
        """
        norm = gradient_norm(self._groups) / self.loss_scale
        rate = self._lr_factor(self.num_updates)  # as a part of `lr`
        if self.num_updates >= self._warmup_steps:
            rate = self._min_lr_ratio + (1 - self._min_lr_ratio) * rate
        self.last_lr = self._lr * rate
        for group in self.adamw.param_groups:
            group["lr"] = self.last_lr
        observed = self._take_observed(norm).to(norm.device)
        failed = ~(norm.isfinite() & observed[0].isfinite())
        self._update(self.loss_scale / clip_factor(norm, max_norm), failed.float())
        loss, num_nonfinite, has_failed = torch.stack([*observed, failed]).tolist()
        if has_failed:
            self._skip(SkippedUpdate(float(norm), loss, int(num_nonfinite)))
        else:
            self.skipped_in_a_row = self.failed_in_a_row = 0
            self._steps_at_scale += self._scaling
            if self._scaling and self._steps_at_scale % _GROWTH_INTERVAL == 0:
                self.loss_scale *= 2
        self.num_updates += 1
        return norm

    def _update(self, divisor: torch.Tensor, failed: torch.Tensor) -> None:
        """Update by the gradients, divided by `divisor`, unless `failed` is 1; clear them."""
        for parameter, local in zip(self.parameters, self._local, strict=True):
            shard = local_shard(parameter)
            if shard.data_ptr() != local.data_ptr():  # it has other memory, as after half().float()
                local.data = shard
            local.grad = None if parameter.grad is None else local_shard(parameter.grad)
            parameter.grad = None
        # A CPU tells for nothing that there is nothing to divide or to skip.
        is_known = divisor.is_cpu
        self.adamw.grad_scale = None if is_known and divisor == 1 else divisor
        self.adamw.found_inf = None if is_known and not failed else failed
        with self.offloader.on_device():
            self.adamw.step()
        for local in self._local:
            local.grad = None

    def _skip(self, update: SkippedUpdate) -> None:
        """Count a skipped update; lower the loss scale where that may help the next one."""
        lowers_scale = self._scaling and update.is_overflow
        self._skipped.append(update)
        self.skipped_in_a_row += 1
        self.failed_in_a_row += not lowers_scale or self.loss_scale <= 1
        self._steps_at_scale = 0
        if lowers_scale:
            self.loss_scale /= 2

    def pop_skipped(self) -> list[SkippedUpdate]:
        """Return the updates skipped since the last call."""
        skipped, self._skipped = self._skipped, []
        return skipped

    @torch.no_grad()
    def moments(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's state as `<parameter>/<key>`, not copied, to save or to load into.

        It is created (zeros) if no update has been made.
        """
        moments: dict[str, torch.Tensor] = {}
        for (name, parameter), local in zip(self._named.items(), self._local, strict=True):
            state = self.adamw.state[local]
            state.update({} if state else self.adamw.new_state(local))
            for key, value in state.items():
                is_step = key == "step"
                moments[f"{name}/{key}"] = value if is_step else with_shard(parameter, value)
        return moments

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the loss scale; for tensors see `moments`."""
        return {
            "param_dtype": self._param_dtype,
            "schedule_step": self.num_updates,
            "loss_scale": self.loss_scale,
            "steps_at_scale": self._steps_at_scale,
            "skipped_in_a_row": self.skipped_in_a_row,
            "failed_in_a_row": self.failed_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("param_dtype", self._param_dtype) == self._param_dtype:
            self.loss_scale = state["loss_scale"]
            self._steps_at_scale = int(state["steps_at_scale"])
        self.num_updates = int(state["schedule_step"])
        self.skipped_in_a_row = int(state.get("skipped_in_a_row", 0))
        self.failed_in_a_row = int(state.get("failed_in_a_row", 0))


class PlacedAlike(NamedTuple):
    """Parameters whose gradients are divided along the same dimensions of one mesh."""

    mesh: DeviceMesh | None  # None: plain tensors
    is_sharded: tuple[bool, ...]  # along each dimension of the mesh
    parameters: list[nn.Parameter]


def by_placement(parameters: Iterable[nn.Parameter]) -> list[PlacedAlike]:
    groups: dict[Any, PlacedAlike] = {}
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        placements = getattr(parameter, "placements", ())
        key = mesh, tuple(not isinstance(p, Replicate) for p in placements)
        groups.setdefault(key, PlacedAlike(*key, [])).parameters.append(parameter)
    return list(groups.values())


@torch.no_grad()
def gradient_norm(groups: Iterable[PlacedAlike]) -> torch.Tensor:
    """Return the global L2 norm of the gradients, float32 []: of the full model, on all ranks."""
    norms = []
    for mesh, is_sharded, parameters in groups:
        grads = [local_shard(p.grad) for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if mesh is not None:
            sums = [Partial() if sharded else Replicate() for sharded in is_sharded]
            norm = DTensor.from_local(norm.square(), mesh, sums).full_tensor().sqrt()
        norms.append(norm)
    return torch.nn.utils.get_total_norm(norms)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that clips gradients of the global norm `norm`; 1 if it is not finite."""
    return torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
