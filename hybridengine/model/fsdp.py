"""FSDP2 of a model: mesh, groups, collectives over gloo, and weights offloaded to host memory.

Gloo's own all-gather receives into a temporary buffer of the full size and copies it; its
reduce-scatter all-reduces a copy of the full input, which is twice the traffic. Here every rank
sends each other rank exactly its chunk, from and into the tensors themselves; gradients in
bfloat16, which are added in float32. Buffers and gradients are reused from step to step: clearing
new pages for them costs more than filling them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from hybridengine.kernels import empty_from_pool
from hybridengine.model.parameters import unwrapped_name
from hybridengine.run.config.common import ShardingConfig
from hybridengine.run.messages import group_timeout
from hybridengine.sync.shards import local_shard

KEPT_BYTES = 2 << 30  # of a model whose gathered weights stay until the backward pass
GROUP_BYTES = 128 << 20  # of the gathered weights of small layers that are gathered together
_SUM_BLOCK = 1 << 16  # elements that are added at a time, so that they stay in a core's cache


def sharding_mesh(device_type: str, world_size: int, fsdp_size: int = -1) -> DeviceMesh:
    """Return a 1-D mesh of all ranks, or an HSDP mesh of replicas of `fsdp_size` ranks each.

    Every replica holds the full model, so all-gathers stay among its ranks, at world_size /
    fsdp_size times the memory; gradients are reduced over all ranks.
    """
    if fsdp_size in (-1, world_size):
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    return mesh_2d(device_type, world_size, fsdp_size, ("replica", "shard"))


def mesh_2d(device_type: str, world_size: int, size: int, names: tuple[str, str]) -> DeviceMesh:
    """Return a mesh of `size` consecutive ranks by all others."""
    ranks, timeout = torch.arange(world_size).view(-1, size), group_timeout()
    groups = [
        dist.new_subgroups_by_enumeration(lists.tolist(), timeout)[0] for lists in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)


def shard_model(
    model: nn.Module,
    groups: Sequence[nn.Module],
    mesh: DeviceMesh,
    sharding: ShardingConfig,
    *,
    shard_dim1: Callable[[str], bool],
    ignored: set[nn.Parameter],
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
) -> Callable[[Mapping[str, Tensor]], None]:
    """Apply FSDP2 to each of `groups` and to the rest of `model`, in place.

    Without a `wrap_policy`, small neighbours among `groups` become one.
    Returns what gives the shards memory and values: rank 0's, of full tensors by name. Collective.

    ignored: parameters that are not sharded.
    experts: modules that are divided over ranks; each part is sharded over `expert_mesh`.
    Others: see `LoadOptions`.
    """
    # An adapter's A has the columns of its weight.
    names = {
        id(p): unwrapped_name(name).replace(".lora_A.default.", ".")
        for name, p in model.named_parameters()
    }
    shard_size, pinned = mesh.size(mesh.ndim - 1), torch.cuda.is_available()
    dtype: torch.dtype = getattr(torch, sharding.dtype)

    def placement(param: nn.Parameter) -> Shard | None:
        divides = param.ndim > 1 and param.shape[1] % shard_size == 0
        return Shard(1) if divides and shard_dim1(names[id(param)]) else None

    # `DirectReduceScatter` adds bfloat16 in float32. Without shards FSDP2 only all-reduces, in the
    # dtype of what is sent. It divides float16 before that is sent.
    direct = mesh.device_type == "cpu"
    sends = None if direct and shard_size > 1 and dtype == torch.bfloat16 else torch.float32
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": fsdp.MixedPrecisionPolicy(dtype, sends),
        "shard_placement_fn": placement,
        "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=pinned)
        if sharding.offload_policy
        else fsdp.OffloadPolicy(),
        "ignored_params": ignored,
    }
    size = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    reshards = {"on": True, "off": False}.get(sharding.reshard_after_forward, size > KEPT_BYTES)
    # Cast inputs would round the rotary embedding of models that have it in float32.
    policy = fsdp.MixedPrecisionPolicy(dtype, sends, cast_forward_inputs=False)
    inner = options | {"reshard_after_forward": reshards, "mp_policy": policy}
    for module in experts:  # FSDP2 requires inner modules first
        own = {"mesh": expert_mesh, "shard_placement_fn": lambda param: Shard(1)}
        fsdp.fully_shard(module, **inner | own)
    is_explicit = sharding.wrap_policy.min_num_params > 0
    units = join_small(model, groups, 0 if is_explicit else GROUP_BYTES // dtype.itemsize)
    for unit in reversed(units):
        fsdp.fully_shard(unit, **inner)
    # FSDP2 does not reshard the root after forward: backward begins with its parameters.
    fsdp.fully_shard(model, **options)
    firsts = [unit[0] for unit in units]
    for module in (*experts, *firsts, model) if direct else ():
        assert isinstance(module, fsdp.FSDPModule)
        module.set_custom_all_gather(DirectAllGather())
        module.set_custom_reduce_scatter(DirectReduceScatter())
    for first, following in pairwise(firsts) if sharding.forward_prefetch else ():
        assert isinstance(first, fsdp.FSDPModule) and isinstance(following, fsdp.FSDPModule)
        first.set_modules_to_forward_prefetch([following])

    def load(state: Mapping[str, Tensor]) -> None:
        home = "cpu" if sharding.offload_policy else mesh.device_type
        # As `to_empty`, which would also replace the memory of ignored parameters.
        model._apply(lambda x: torch.empty_like(x, device=home) if x.is_meta else x)
        full: dict[str, Any] = {name: x.detach() for name, x in state.items()}
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=not ignored)
        set_model_state_dict(model, full, options=how)

    return load


def join_small(
    model: nn.Module, layers: Sequence[nn.Module], max_numel: int
) -> list[list[nn.Module]]:
    """Return `layers`, neighbours of one parent together where they have few parameters."""
    parents = {child: module for module in model.modules() for child in module.children()}
    joined: list[list[nn.Module]] = []
    total = 0
    for layer in layers:
        numel = sum(p.numel() for p in layer.parameters())
        total += numel
        if joined and total <= max_numel and parents[layer] is parents[joined[-1][-1]]:
            joined[-1].append(layer)
        else:
            joined.append([layer])
            total = numel
    return joined


def modules_of_size(model: PreTrainedModel, min_num_params: int) -> list[nn.Module]:
    """Return the smallest modules with `min_num_params` parameters, not counting nested groups."""
    embeddings = {model.get_input_embeddings(), model.get_output_embeddings()}  # may be tied
    chosen: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        """Return the number of parameters of `module` that are in no group yet."""
        num_params = sum(p.numel() for p in module.parameters(recurse=False))
        num_params += sum(visit(child) for child in module.children())
        is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict)  # FSDP2 hooks forward
        if num_params < min_num_params or not is_called or embeddings & set(module.modules()):
            return num_params
        chosen.add(module)
        return 0

    visit(model)
    return [module for module in model.modules() if module in chosen]


class _PooledMemory(Comm):
    """Take buffers, and with them the sharded gradients, from the pool of the last step's."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return empty_from_pool(size, dtype, device)


class DirectAllGather(_PooledMemory, AllGather):
    """Gather one chunk of every rank, in place: the input may be this rank's part of the output."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if async_op:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=True)
        chunks = list(output_tensor.view(group.size(), -1))
        own = chunks[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        _exchange([own] * group.size(), chunks, group)
        return None


class DirectReduceScatter(_PooledMemory, ReduceScatter):
    """Add one chunk of every rank, in the order of the ranks, and in float32 at least."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        dtype = torch.promote_types(input_tensor.dtype, torch.float32)
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            output_tensor.data = output_tensor.to(dtype)
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor.to(dtype), op, group, async_op=async_op
            )
        sent = list(input_tensor.view(group.size(), -1))
        received = [self.allocate(x.shape, dtype=x.dtype, device=x.device) for x in sent[1:]]
        received.insert(group.rank(), sent[group.rank()])
        _exchange(sent, received, group)
        if output_tensor.dtype != dtype:  # FSDP2 allocates in the dtype of what is sent
            size, device = output_tensor.shape, output_tensor.device
            output_tensor.data = self.allocate(size, dtype=dtype, device=device)
        blocks = (x.split(_SUM_BLOCK) for x in (output_tensor, *received))
        for total, *parts in zip(*blocks, strict=True):
            total.copy_(parts[0])
            for part in parts[1:]:
                total += part
            if op == dist.ReduceOp.AVG:
                total /= group.size()
        return None


def _exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send sent[r] to rank r and receive received[r] from it, for all ranks r but this one."""
    others = [r for r in range(group.size()) if r != group.rank()]
    works = [dist.irecv(received[r], group=group, group_src=r) for r in others]
    works += [dist.isend(sent[r], group=group, group_dst=r) for r in others]
    for work in works:
        assert work is not None  # this rank is in the group
        work.wait()


class Offloader:
    """Tensors that are on their device inside `on_device()` only, and empty outside of it.

    FSDP2's `CPUOffloadPolicy` streams every all-gather from host memory and steps there; this moves
    all tensors once per phase. Storages are resized to zero and back, not replaced, so the views
    and references that FSDP2, the optimizer and the reshard hold stay valid. Do not read, write or
    save an offloaded tensor.

    tensors: called at every offload, so that optimizer state may be created later.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], enabled: bool = True) -> None:
        self._tensors, self._enabled = tensors, enabled
        self._depth = 0
        self._offloaded: list[tuple[torch.UntypedStorage, Tensor]] = []
        if enabled:
            self._offload()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Onload the tensors; offload them again at the end of the outermost block."""
        self._depth += 1
        for storage, host in self._offloaded:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
        self._offloaded.clear()
        yield
        self._depth -= 1
        if self._enabled and not self._depth:
            self._offload()

    def _offload(self) -> None:
        all_storages = (local_shard(tensor).untyped_storage() for tensor in self._tensors())
        storages = {s.data_ptr(): s for s in all_storages if s.nbytes()}
        for storage in storages.values():
            device_bytes = _bytes_of(storage)
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device_bytes.is_cuda)
            self._offloaded.append((storage, host.copy_(device_bytes, non_blocking=True)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # finish the copies before their sources are freed
        for storage in storages.values():
            storage.resize_(0)
        torch.cuda.empty_cache()  # the engine has an allocator of its own


@contextmanager
def on_device(model: nn.Module) -> Iterator[nn.Module]:
    """Yield `model` (of `load_causal_lm`) with its weights onloaded."""
    with model.offloader.on_device():  # type: ignore[operator, union-attr]
        yield model


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
