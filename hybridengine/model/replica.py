"""A model that no other rank shares: float32 masters, and copies in the type of the computation.

FSDP2 on one rank would gather, cast and reduce every layer for nobody. As there, the modules have
the masters between passes, and what they compute with during a forward and a backward. The
gradient of a copy is added to that of its master in float32. A model that computes in float32 has
the masters alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_iter, tree_map_only

from hybridengine.kernels import empty_from_pool
from hybridengine.run.errors import ModelError


class Writes:
    """Tells by a changed `state()` that parameters may have been written, while `model` is used."""

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        self._watched = list(parameters)
        self._steps = steps = [0]  # fused ones do not change the versions of tensors

        def add(*_: Any) -> None:
            steps[0] += 1

        weakref.finalize(model, register_optimizer_step_post_hook(add).remove)

    def state(self) -> list[int]:
        versions = (p._version + getattr(p, "_local_tensor", p)._version for p in self._watched)
        return [self._steps[0], *versions]


class Replica:
    """Has `model` compute in `dtype`, from its float32 parameters.

    layers: modules whose floating-point inputs are cast, as those of the model are.
    ignored: parameters that the model computes with as they are.
    copies: master → what takes its place in a pass; none in float32.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        dtype: torch.dtype,
        ignored: set[nn.Parameter],
    ) -> None:
        self._owned = True
        model.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)
        model.register_forward_hook(self._end, always_call=True)
        cast = [p for p in model.parameters() if p.dtype == torch.float32 and p not in ignored]
        masters = cast if dtype != torch.float32 else []
        self._use(model, {p: torch.empty_like(p, dtype=dtype) for p in masters})
        for module in (model, *layers) if dtype != torch.float32 else ():
            module.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)

    def _use(self, model: nn.Module, memory: Mapping[nn.Parameter, Tensor]) -> None:
        self.copies = {master: nn.Parameter(copy) for master, copy in memory.items()}
        for master, copy in self.copies.items():
            copy.register_post_accumulate_grad_hook(partial(_add_gradient, master))
        self._masters = [
            (module._parameters, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter in self.copies
        ]
        self._copied = [(owner, name, self.copies[p]) for owner, name, p in self._masters]
        self._known = {*map(id, self.copies), *map(id, self.copies.values())}
        self._writes, self._state = Writes(model, self.copies), list[int]()

    def compute_with(self, model: nn.Module, memory: Mapping[nn.Parameter, Tensor]) -> None:
        """Take these tensors for the copies; who writes them has them agree with the masters."""
        self._owned = False
        self._use(model, memory)

    def owned(self) -> list[Tensor]:
        """Return the memory of the copies, unless it is another's."""
        return [*self.copies.values()] if self._owned else []

    def restore(self) -> None:
        """Give the modules their masters, which they have between passes."""
        self._place(self._masters)

    @staticmethod
    def _place(slots: Iterable[tuple[dict[str, Any], str, nn.Parameter]]) -> None:
        for owner, name, parameter in slots:
            owner[name] = parameter

    def _begin(self) -> None:
        if any(id(owner[name]) not in self._known for owner, name, _ in self._masters):
            raise ModelError(
                "the parameters of the model were replaced, by load_state_dict(assign=True) or a "
                "cast; its gradients are added to those it was loaded with, so write into them"
            )
        # Not every write changes the state (`p.data.mul_`), but none comes between micro-batches.
        state, is_pending = self._writes.state(), any(p.grad is not None for p in self.copies)
        if state != self._state or not is_pending:
            for master, copy in self.copies.items():
                copy.requires_grad_(master.requires_grad)
            if copies := self.owned():
                # As far as known the values stay, which an earlier forward has saved for backward.
                stays = copies if state == self._state else []
                with torch.no_grad(), _unsafe_preserve_version_counter(tuple(stays)):
                    torch._foreach_copy_(copies, [*self.copies])
            self._state = state
        self._place(self._copied)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.restore()
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        """Have the copies there until the end, for layers that are computed again."""
        self._place(self._copied)
        torch.autograd.Variable._execution_engine.queue_callback(self.restore)


@torch.no_grad()
def _add_gradient(master: nn.Parameter, copy: Tensor) -> None:
    grad, copy.grad = copy.grad, None
    assert grad is not None
    if master.grad is not None:
        master.grad += grad
    elif grad.dtype == master.dtype:
        master.grad = grad
    else:
        master.grad = empty_from_pool(grad.shape, master.dtype, grad.device).copy_(grad)


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Cast as FSDP2's `cast_forward_inputs`."""

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    result: tuple[Any, dict[str, Any]] = tree_map_only(Tensor, cast, (args, kwargs))
    return result
