"""A frozen base in memory that somebody else owns: the weights of the rollout engine.

Such parameters are not sharded, and FSDP2 leaves them alone (`ignored_params`): nothing is
gathered, copied or cast. Their bits are those of FSDP2's unsharded parameters if their dtype is
that of the computation. Where an engine rank has a part of them, or has them quantized
(`LayeredWeights`), hooks gather them layer by layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_iter

from hybridengine.model.parameters import unwrapped_name
from hybridengine.model.shared_weights import LayeredWeights
from hybridengine.run.errors import ModelError


def base_parameters(
    model: nn.Module, memory: Mapping[str, torch.Tensor]
) -> dict[str, nn.Parameter]:
    """Return the parameters of `model` that are frozen in `memory`, by its names.

    Raises ModelError for names that the model does not have, or that it trains.
    """
    named = {unwrapped_name(name): p for name, p in model.named_parameters()}
    trained = [n for n in memory if n not in named or named[n].requires_grad]
    if trained:
        raise ModelError(f"{trained[0]!r} is no frozen parameter of the model")
    return {name: named[name] for name in memory}


def place_base(
    model: nn.Module, base: Mapping[str, nn.Parameter], memory: Mapping[str, torch.Tensor]
) -> None:
    """Replace the meta parameters `base` of `model`, wherever it uses them, by `memory`."""
    placed = {
        id(parameter): nn.Parameter(memory[name], requires_grad=False)
        for name, parameter in base.items()
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in placed:
                module._parameters[name] = placed[id(parameter)]


@torch.no_grad()
def fill_base(memory: Mapping[str, torch.Tensor], weights: nn.Module | None) -> None:
    """Write the parameters of `weights`, the full model on rank 0, on every rank; collective."""
    base = {} if weights is None else base_parameters(weights, memory)
    writing = memory.writing if isinstance(memory, LayeredWeights) else None
    for name in memory:
        with nullcontext(memory[name]) if writing is None else writing(name) as tensor:
            if base:
                tensor.copy_(base[name])
            dist.broadcast(tensor, 0)


class GatheredBase:
    """Gathers the base of a model for its forward and backward, one of `layers` at a time.

    While a layer computes, the values of the next one are received.
    What no single layer uses alone (embedding, head) is there from the beginning of the model's
    forward to the end of the backward; without gradients, to the end of the forward. All ranks of a
    group run the same layers in the same order, as under FSDP2. A backward through several forwards
    takes the last one first, as autograd does.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], memory: LayeredWeights
    ) -> None:
        self.memory = memory
        users: dict[str, set[nn.Module | None]] = defaultdict(set)
        layer_of = {module: layer for layer in layers for module in layer.modules()}
        names = {id(p): unwrapped_name(name) for name, p in model.named_parameters()}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                users[names[id(parameter)]].add(layer_of.get(module))
        parts: dict[nn.Module, list[str]] = {module: [] for module in (model, *layers)}
        for name in memory:
            user = next(iter(users[name])) if len(users[name]) == 1 else None
            parts[model if user is None else user].append(name)
        self._root = parts[model]
        self._current: list[str] = []  # of a layer
        model.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)
        model.register_forward_hook(lambda module, args, output: self._end(output))
        order = [[], *(parts[layer] for layer in layers), []]
        for layer, before, own, after in zip(layers, order, order[1:], order[2:], strict=False):
            self._add_hooks(layer, before, own, after)

    def _add_hooks(
        self, layer: nn.Module, before: list[str], own: list[str], after: list[str]
    ) -> None:
        """Gather a layer, and begin to gather the next one. before, after: of its neighbours."""

        def forward(*_: Any) -> None:
            if own is not self._current:  # else it is recomputed
                self._gather(own)
                self.memory.start(after)

        def backward(_: torch.Tensor) -> None:
            self._gather(own)
            self.memory.start(before)

        def prepare_backward(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in _with_gradient(output):
                tensor.register_hook(backward)

        layer.register_forward_pre_hook(forward, prepend=True)
        layer.register_forward_hook(prepare_backward)

    def _gather(self, names: list[str]) -> None:
        """Replace the layer that is there."""
        if names is not self._current:
            self.memory.free(self._current)
            self._current = names
        self.memory.gather(names)

    def _begin(self) -> None:
        self.free()
        self.memory.gather(self._root)

    def _end(self, output: Any) -> None:
        tensors = _with_gradient(output)
        for tensor in tensors:
            tensor.register_hook(lambda gradient: self._begin_backward())
        if not tensors:
            self.free()

    def _begin_backward(self) -> None:
        self.memory.gather(self._root)
        torch.autograd.Variable._execution_engine.queue_callback(self.free)

    def free(self) -> None:
        """Free what was gathered."""
        self.memory.free(self._root)
        self.memory.free(self._current)
        self._current = []


@contextmanager
def full_base(model: nn.Module, name: str) -> Iterator[None]:
    """Have a parameter of a gathered base, by its name without adapters, while open. Collective."""
    base = getattr(model, "gathered_base", None)
    if base is not None:
        base.memory.gather([name])
    yield
    if base is not None:
        base.memory.free([name])


def _with_gradient(output: Any) -> list[torch.Tensor]:
    return [x for x in tree_iter(output) if isinstance(x, torch.Tensor) and x.requires_grad]
