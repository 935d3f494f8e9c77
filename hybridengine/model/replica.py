"""A model that each rank has all of: float32 masters, and copies in the type of the computation.

FSDP2 would gather, cast and reduce every layer for nobody. As there, the modules have the masters
between passes, and what they compute with during a forward and a backward. The gradient of a copy
is added to that of its master in float32. A model that computes in float32 has the masters alone.
Ranks with replicas average their gradients at the end of the last backward of an optimizer step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_iter, tree_map_only

from hybridengine.kernels import empty_from_pool
from hybridengine.model.extensions import ModelHook, add_hook, hooks_of
from hybridengine.model.packed import PackedBatch
from hybridengine.run.errors import ModelError

REDUCED_BYTES = 64 << 20  # of gradients, in one collective


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


class Replica(ModelHook):
    """Has `model`, on the meta device, compute in `dtype` from its float32 parameters.

    layers: those that FSDP2 would gather one after another.
    mesh: its first dimension are the ranks that have the same parameters.
    copies: master → what takes its place in a pass; none in float32.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, dtype: torch.dtype
    ) -> None:
        self.layers, self._model, self._mesh, self._dtype = layers, model, mesh, dtype
        self._owned, self._is_backward = True, False
        self._backwards = 1  # before gradients are averaged
        add_hook(model, self)
        model.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)
        model.register_forward_hook(self._end, always_call=True)
        if dtype != torch.float32:
            model.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Give each parameter on the meta device a master: rank 0's, of `state`; collective."""
        model, device = self._model, self._mesh.device_type
        named = model.named_parameters(remove_duplicate=False)  # tied ones stay one parameter
        missing = {name: p for name, p in named if p.is_meta}
        for tensor in {*state.values()}:  # it may be mapped from a file
            tensor.data = tensor.data.to(device, copy=True)
        if dist.get_rank():
            made = {p: nn.Parameter(torch.empty_like(p, device=device)) for p in missing.values()}
            state = {name: made[p] for name, p in missing.items()}
        model.load_state_dict(state, strict=False, assign=True)
        for parameter in {model.get_parameter(name): None for name in missing}:
            dist.broadcast(parameter.data, 0)
        cast = [p for p in model.parameters() if p.dtype == torch.float32 != self._dtype]
        self._use({p: torch.empty_like(p, dtype=self._dtype) for p in cast})

    def _use(self, memory: Mapping[nn.Parameter, Tensor]) -> None:
        self.copies = {master: nn.Parameter(copy) for master, copy in memory.items()}
        for master, copy in self.copies.items():
            copy.register_post_accumulate_grad_hook(partial(_add_gradient, master))
        self._masters = [
            (module._parameters, name, parameter)
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if parameter in self.copies
        ]
        self._copied = [(owner, name, self.copies[p]) for owner, name, p in self._masters]
        self._known = {*map(id, self.copies), *map(id, self.copies.values())}
        self._writes, self._state = Writes(self._model, self.copies), list[int]()

    def compute_with(self, memory: Mapping[nn.Parameter, Tensor]) -> None:
        """Take these tensors for the copies; who writes them has them agree with the masters."""
        self._owned = False
        self._use(memory)

    def owned(self) -> list[Tensor]:
        """Return the memory of the copies, unless it is another's."""
        return [*self.copies.values()] if self._owned else []

    def begin_step(self, batches: Sequence[PackedBatch], grad_scale: float = 1.0) -> None:
        self._backwards = len(batches)

    def restore(self) -> None:
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
        self._is_backward = False  # an error may have ended the last one

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.restore()
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        """Have the copies there until the end, for layers that are computed again."""
        self._place(self._copied)
        if not self._is_backward:  # of several outputs
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._is_backward = True

    def _end_backward(self) -> None:
        self.restore()
        self._is_backward = False
        self._backwards -= 1
        if not self._backwards:
            self._backwards = 1
            if self._mesh.size() > 1:
                self._average_gradients()

    @torch.no_grad()
    def _average_gradients(self) -> None:
        """Average the gradients over the replicas, many in one collective."""
        trained = [p for p in self._model.parameters() if p.requires_grad]
        group = self._mesh.get_group(0)
        exists = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
        dist.all_reduce(exists, dist.ReduceOp.MAX, group)  # on the host: no device is waited for
        reduced = [p for p, flag in zip(trained, exists.tolist(), strict=True) if flag]
        works = []
        while reduced:
            ends = accumulate(p.numel() * p.itemsize for p in reduced)
            count = max(1, sum(end <= REDUCED_BYTES for end in ends))
            bucket, reduced = reduced[:count], reduced[count:]
            sizes = [p.numel() for p in bucket]
            flat = empty_from_pool([sum(sizes)], bucket[0].dtype, bucket[0].device)
            parts = flat.split(sizes)
            for parameter, part in zip(bucket, parts, strict=True):
                part = part.view_as(parameter)
                part.zero_() if parameter.grad is None else part.copy_(parameter.grad)
                parameter.grad = part
            works.append((flat, dist.all_reduce(flat, group=group, async_op=True)))
        for flat, work in works:
            work.wait()
            flat /= group.size()


def replica_of(model: nn.Module) -> Replica | None:
    """Return that of a model without FSDP2."""
    return next((hook for hook in hooks_of(model) if isinstance(hook, Replica)), None)


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
