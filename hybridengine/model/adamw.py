"""AdamW on local shards, which can also tell what changed for the engine between weight syncs.

Anything may write to a parameter between two updates, in many ways that no version counter shows
(DTensor's operations, `.data`, a tensor that takes its place). So the changes of several updates
name the bits that they lead from and to by checksums, which a sync compares with what it has sent
and with what it reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridengine.errors import ModelError
from hybridengine.kernels import adamw_, change_mask, take_changed
from hybridengine.sharding.changes import ChangedElements
from hybridengine.sharding.shards import local_shard

_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")


@dataclass
class _Tracked:
    """Changes of one parameter by the updates since they were last taken.

    before: checksum of the shard before the first of these updates; None without an update, and
      if something else wrote to the shard between two of them.
    after: checksum of the shard after the last of these updates; None without one.
    """

    dtype: torch.dtype
    mask: Tensor
    before: int | None = None
    after: int | None = None


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True) with `hybridengine.kernels.adamw_`.

    State, state dict and param groups are torch's, so either optimizer loads what the other saved.
    Parameters are float32 (or float64, slowly) and contiguous; of a DTensor the local shard is
    updated, without DTensor's dispatch.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)
        self._step_supports_amp_scaling = False  # a GradScaler unscales the gradients itself
        self._tracked: dict[Tensor, _Tracked] = {}

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_factor: Tensor | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of `closure`, called first.

        grad_factor: float32 [], by which gradients are multiplied as they are read; they are not
        written.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            calls: dict[Any, list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    tracked = self._tracked.get(param)
                    dtype = tracked and tracked.dtype
                    calls[param.device, param.dtype, param.grad.dtype, dtype].append(param)
            for (device, *_, dtype), params in calls.items():
                factor = None if grad_factor is None else grad_factor.to(device)
                self._update(params, group, factor, dtype)
        return loss

    def _update(
        self,
        params: list[Tensor],
        group: dict[str, Any],
        grad_factor: Tensor | None,
        engine_dtype: torch.dtype | None,
    ) -> None:
        states = [self.state_of(param) for param in params]
        steps = [state["step"] for state in states]
        shards = [local_shard(param) for param in params]
        grads = [param.grad for param in params if param.grad is not None]
        tracked = [self._tracked[param] for param in params] if engine_dtype else []
        torch._foreach_add_(steps, 1)
        checksums = adamw_(
            shards,
            [local_shard(grad).contiguous() for grad in grads],
            *([local_shard(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq")),
            steps,
            **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
            grad_factor=grad_factor,
            changed=[t.mask for t in tracked],
            engine_dtype=engine_dtype,
        )
        for t, (before, after) in zip(tracked, checksums.tolist(), strict=True):
            if t.after is None:
                t.before = before
            elif t.after != before:
                t.before = None
            t.after = after

    @torch.no_grad()
    def state_of(self, param: Tensor) -> dict[str, Tensor]:
        """Return the state of `param`: step, exp_avg, exp_avg_sq; zeros before its first update."""
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), device=local_shard(param).device)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch.optim.AdamW.

        Raises ModelError if that used an option which this class does not have.
        """
        groups = state_dict["param_groups"]
        used = {name for group in groups for name in _UNSUPPORTED if group.get(name)}
        if used:
            raise ModelError(
                f"the optimizer state was saved with {', '.join(sorted(used))}, which AdamW here "
                "does not support; load it with torch.optim.AdamW."
            )
        groups = [{**group, "fused": True, "foreach": None} for group in groups]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def track_changes(self, dtypes: Mapping[Tensor, torch.dtype]) -> None:
        """Begin to mark what changes of the given parameters, each in its engine's dtype.

        It takes a bit per element, and on GPUs two reads of the parameter in an update. What was
        marked before is dropped.
        """
        self._tracked = {
            param: _Tracked(dtype, change_mask(local_shard(param)))
            for param, dtype in dtypes.items()
        }

    @torch.no_grad()
    def take_changes(self, max_share: float = 1.0) -> dict[Tensor, ChangedElements] | None:
        """Return what the updates since the last call changed, for every tracked parameter.

        An element is in it if one of them changed its value in the engine's dtype, with the value
        that it has now. None: more than `max_share` of the elements of one dtype.
        """
        by_call: dict[Any, list[Tensor]] = defaultdict(list)
        for param, tracked in self._tracked.items():
            shard = local_shard(param)
            by_call[shard.device, shard.dtype, tracked.dtype].append(param)
        changes: dict[Tensor, ChangedElements] = {}
        few = True
        for (*_, dtype), params in by_call.items():
            all_tracked = [self._tracked[param] for param in params]
            masks, shards = [t.mask for t in all_tracked], [local_shard(param) for param in params]
            taken = take_changed(masks, shards, dtype=dtype, max_share=max_share)
            few &= taken is not None
            for param, t, (indices, values) in zip(params, all_tracked, taken or [], strict=False):
                changes[param] = ChangedElements(indices, values, t.before, t.after)
            for t in all_tracked:
                t.before = t.after = None
        return changes if few else None
