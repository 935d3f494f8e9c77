"""Unsharded parameters in memory that somebody else owns: the weights of the rollout engine.

FSDP2 computes with what it gathers from the shards. After a weight sync the engine on the same
rank, or its tensor-parallel group, holds these bits, so they are taken from there: nothing is cast,
or gathered over the ranks of the shards. Gradients are reduced into the shards as ever. Of FSDP2
this uses the extensions of a sharded tensor (`fsdp_pre_all_gather`, `fsdp_post_all_gather`) and
`set_custom_all_gather`.

A frozen base has no shards, and FSDP2 leaves it alone (`ignored_params`). Its bits are those of
FSDP2's unsharded parameters if their dtype is that of the computation. Where an engine rank has a
part of it, or has it quantized (`LayeredWeights`), hooks gather it layer by layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_iter

from hybridengine.model.fsdp import on_device
from hybridengine.model.parameters import unwrapped_name
from hybridengine.model.replica import Writes, replica_of
from hybridengine.model.shared_weights import LayeredWeights, SlicedWeights
from hybridengine.run.errors import ModelError
from hybridengine.sync.shards import ShardSpec, local_shard
from hybridengine.sync.weight_target import StaleWeightsError, WeightTarget

_TESTED = ("2.13.",)  # versions of torch; the extensions are no stable interface
_BITS = {2: torch.int16, 4: torch.int32}


def untested_torch() -> str | None:
    """Return why this version of torch cannot share parameters; None if it can."""
    if torch.__version__.startswith(_TESTED):
        return None
    return f"torch is {torch.__version__}, and FSDP2's extensions were tested with 2.13"


class SharedParameters:
    """Makes `memory` the unsharded parameters of a sharded `model`. Collective.

    memory: every parameter in the dtype of the computation: contiguous views of the engine's
      tensors, or `SlicedWeights`, which FSDP2's unshards gather and its reshards free.
    target: the engine's weights, which a weight sync writes.

    A forward after the shards have changed raises StaleWeightsError until the next weight sync.
    """

    def __init__(
        self, model: nn.Module, memory: Mapping[str, Tensor], target: WeightTarget
    ) -> None:
        named = {unwrapped_name(name): p for name, p in model.named_parameters()}
        if named.keys() != memory.keys():
            name = min(named.keys() ^ memory.keys())
            raise ModelError(f"{name!r} is a parameter of the model or of the engine alone")
        self._memory, self._target, self._shards = memory, target, named
        self._state: list[int | None] = []  # in which shards and `memory` are compared
        self._unverified: set[str] = set()  # to be compared when they are unsharded
        self._differs: dict[str, Tensor] = {}  # of this forward
        self._writes = Writes(model, named.values())
        self._modules: dict[fsdp.FSDPModule, list[str]] = {}
        if (replica := replica_of(model)) is not None:
            replica.compute_with({p: memory[n].detach() for n, p in named.items()})
            if isinstance(memory, SlicedWeights):
                GatheredBase(model, replica.layers, memory)
        else:
            self._extend(model)
        # Before the hooks that place what it computes with: after an error these would be in the
        # middle of a forward.
        model.register_forward_pre_hook(lambda module, args: self._begin(), prepend=True)
        model.register_forward_hook(lambda module, args, output: self._end())

    def _extend(self, model: nn.Module) -> None:
        """Give FSDP2's parameters their `_Extension`."""
        shards = dict[str, DTensor]()
        for name, parameter in self._shards.items():
            assert isinstance(parameter, DTensor)
            shards[name] = parameter
            if any(isinstance(p, Shard) and p.dim for p in parameter.placements):
                raise ModelError(f"{name!r} is not sharded on dim 0, as FSDP2's extensions need")
        self._modules, memory = _names_by_module(model), self._memory
        for module, names in self._modules.items():
            group = [unwrapped_name(name) for name in names]
            for name in group:
                if isinstance(memory, SlicedWeights) and name in memory.sliced:
                    extension: _Extension = _Joined(name, memory, self._compare, group)
                else:
                    extension = _Extension(name, memory, self._compare)
                extension.attach(shards[name])
            module.set_custom_all_gather(_NoGather())
        with on_device(model):
            self._check_addresses(model)

    def _check_addresses(self, model: nn.Module) -> None:
        """Raise ModelError if FSDP2 computes with other memory."""
        for module, names in self._modules.items():
            module.unshard()
            for name in names:
                parameter, expected = model.get_parameter(name), self._memory[unwrapped_name(name)]
                if (parameter.data_ptr(), parameter.dtype, parameter.shape) != (
                    expected.data_ptr(),
                    expected.dtype,
                    expected.shape,
                ):
                    raise ModelError(f"FSDP2 of torch {torch.__version__} does not share {name!r}")
            module.reshard()

    def _begin(self) -> None:
        """After a sync, a step of an optimizer, or a write, have all parameters compared again."""
        target = self._target
        target.check_complete()
        state = [target.weight_version, target.updates_begun, *self._writes.state()]
        if state == self._state:
            return
        for module in self._modules:
            module.reshard()
        if isinstance(self._memory, SlicedWeights):
            self._memory.restart()
        self._state, self._unverified, self._differs = state, set(self._shards), {}
        for name in () if self._modules else self._shards:
            with _full(self._memory, name):
                self._compare(name)

    @torch.no_grad()
    def _compare(self, name: str) -> None:
        """Compare this rank's shard with its rows of the unsharded parameter, bit by bit."""
        if name not in self._unverified:
            return
        self._unverified.remove(name)
        shard, memory = self._shards[name], self._memory[name]
        spec = ShardSpec.of(name, shard, dist.get_world_size())
        own = memory[tuple(slice(*rows) for rows in spec.box(spec.shard_of(dist.get_rank())))]
        expected = local_shard(shard).to(memory.dtype).contiguous()
        # On a CPU 64 bits at a time take half as long as 16.
        odd = [(x.storage_offset() | x.shape[-1:].numel()) % 4 for x in (own, expected)]
        bits = _BITS[memory.itemsize] if any(odd) else torch.int64
        pair = expected.view(bits), own.view(bits)
        # In one pass, at whose end a device would be waited for.
        differs = pair[0] != pair[1] if own.is_cuda else torch.tensor(not torch.equal(*pair))
        self._differs[name] = differs.any()

    def _end(self) -> None:
        """Raise StaleWeightsError if the forward has used other values than those of the shards."""
        differs, self._differs = self._differs, {}
        if not differs or not (unequal := torch.stack([*differs.values()])).any():
            return
        self._state = []
        raise StaleWeightsError(
            f"{[*differs][int(unequal.int().argmax())]!r} has changed since the sync to weight "
            f"version {self._target.weight_version}, and the forward read what that sync has "
            "written: sync the weights after every optimizer step, or set "
            "model.share_engine_weights=false"
        )


def _names_by_module(model: nn.Module) -> dict[fsdp.FSDPModule, list[str]]:
    """Return the parameters that FSDP2 unshards together, by the first of their modules."""
    owners, firsts = dict[str, fsdp.FSDPModule](), dict[Any, fsdp.FSDPModule]()
    for path, module in model.named_modules():
        if isinstance(module, fsdp.FSDPModule):  # neighbours may share a state
            owners[path] = firsts.setdefault(module._get_fsdp_state(), module)
        else:
            owners[path] = owners[path.rpartition(".")[0]]
    names = defaultdict(list)
    for name, _ in model.named_parameters():
        names[owners[name.rpartition(".")[0]]].append(name)
    return names


class _Extension:
    """Gives FSDP2 a tensor of `memory` as the unsharded form of a parameter.

    compare: called with the name whenever the parameter is unsharded.
    """

    def __init__(
        self, name: str, memory: Mapping[str, Tensor], compare: Callable[[str], None]
    ) -> None:
        self._name, self._compare, self._tensor = name, compare, memory[name].detach()
        self._nothing = torch.zeros(1, dtype=torch.bool, device=self._tensor.device)

    def attach(self, parameter: DTensor) -> None:
        local: Any = parameter._local_tensor
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self._before, self._after

    def _before(self, mesh: Any) -> tuple[tuple[Tensor], None]:
        """Return what FSDP2 gathers, which may not be empty."""
        return (self._nothing,), None

    def _after(
        self, gathered: Any, metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the unsharded parameter and what FSDP2 may free; `out` is what it had before."""
        self._compare(self._name)
        return None if out is not None else self._unsharded()

    def _unsharded(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        # FSDP2 reads it from the beginning of its storage. A view of a fused tensor begins later in
        # its own; the alias that DLPack makes begins at the view, and keeps its memory.
        return torch.from_dlpack(self._tensor), ()


class _Joined(_Extension):
    """Joins a parameter from the engine's ranks; `group` are those that are unsharded with it."""

    def __init__(
        self,
        name: str,
        memory: SlicedWeights,
        compare: Callable[[str], None],
        group: list[str],
    ) -> None:
        super().__init__(name, memory, compare)
        self._memory, self._group = memory, group

    def _before(self, mesh: Any) -> tuple[tuple[Tensor], None]:
        self._memory.start(self._group)  # the first of the group does
        return super()._before(mesh)

    def _after(self, *args: Any, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        self._memory.fill(self._name)
        return super()._after(*args, **options)

    def _unsharded(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._tensor, (self._tensor,)


class _NoGather(AllGather):
    """The all-gather of a group whose parameters all have an `_Extension`."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        if input_tensor.dtype != torch.bool:
            raise ModelError(
                "the parameters of the model were replaced, by load_state_dict(assign=True) or a "
                "cast; they are views of the engine's weights, so write into them"
            )


def base_parameters(model: nn.Module, memory: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Return the parameters of `model` that are frozen in `memory`, by its names.

    Raises ModelError for names that the model does not have, or that it trains.
    """
    named = {unwrapped_name(name): p for name, p in model.named_parameters()}
    trained = [n for n in memory if n not in named or named[n].requires_grad]
    if trained:
        raise ModelError(f"{trained[0]!r} is no frozen parameter of the model")
    return {name: named[name] for name in memory}


def place_base(
    model: nn.Module, base: Mapping[str, nn.Parameter], memory: Mapping[str, Tensor]
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
def fill_base(memory: Mapping[str, Tensor], base: Mapping[str, nn.Parameter]) -> None:
    """Write the parameters `base`, of the full model on rank 0, on every rank; collective."""
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

        def backward(_: Tensor) -> None:
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
    base: GatheredBase | None = getattr(model, "gathered_base", None)
    with nullcontext() if base is None else _full(base.memory, name):
        yield


@contextmanager
def _full(memory: Mapping[str, Tensor], name: str) -> Iterator[None]:
    layered = memory if isinstance(memory, LayeredWeights) else None
    if layered is not None:
        layered.gather([name])
    yield
    if layered is not None:
        layered.free([name])


def _with_gradient(output: Any) -> list[Tensor]:
    return [x for x in tree_iter(output) if isinstance(x, Tensor) and x.requires_grad]
