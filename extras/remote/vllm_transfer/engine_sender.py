"""The weights of a model to vLLM engines elsewhere, over a store that trainer rank 0 opens.

    sender = EngineSender("trainer-0")                    # every trainer rank
    sender.set_model(module_arguments(fsdp_model), num_engines=2)
    # the workers of engine i: init_weight_transfer_engine(sender.join_info(i))
    # after every step the workers: start_weight_update(), update_weights({"version": …}), while
    sender.send(version)                                  # every trainer rank

Whoever drives the engines makes the calls of their workers: vLLM's own trainer interface
(`hybridengine.remote.vllm_transfer.trainer`), or another trainer's (`hybridengine.integrations`).
The trainers need no vLLM.

The trainer's weights are those of a module, or of a source as vLLM describes it
(`vllm.distributed.weight_transfer`). Two interfaces of sources are known, a third is refused:

              of a parameter                         this rank's part of it
    vLLM 0.32 metadata() and mesh(), M2NWeightSource the source's own iteration
    vLLM 0.33 metadata, with owners and placements   iter_local()

Sources that vLLM makes of a module (`ModuleSource`, `DTensorModuleSource`) are read from the module
in both versions: its DTensors have more placements than a source can declare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from hybridengine.model.lora import adapter_shards
from hybridengine.model.parameters import parameter_shards, unwrap_peft
from hybridengine.remote.sync.coordinator import Absent
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.run.launch import listening_store
from hybridengine.run.messages import MessageError, broadcast_value, check_secret, run_on_all_ranks
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.resharder import SyncReport
from hybridengine.sync.weight_target import PlanOutdatedError, ReshardError

__all__ = ["PREFIX", "EngineSender", "SenderArguments", "module_arguments", "sender_arguments"]

PREFIX = "weights"  # of the keys in the store

_OF_MODULES = ("ModuleSource", "DTensorModuleSource")
_EXPECTED = (
    "expected vLLM's ModuleSource of the FSDP2 model, or a source of shards: in vLLM 0.32 an "
    "M2NWeightSource, in vLLM 0.33 a WeightSource with iter_local()"
)


class SenderArguments(NamedTuple):
    """The arguments of a `WeightSender` that describe the trained model."""

    parameters: Callable[[], Mapping[str, torch.Tensor]]
    adapters: Callable[[], Mapping[str, Adapter]] = dict
    config: Mapping[str, Any] = MappingProxyType({})


def sender_arguments(source: Any) -> SenderArguments:
    """Return the model of a weight source, as a `WeightSender` reads it.

    Raises TypeError for a source that has no shards, or another interface than vLLM 0.32 and 0.33.
    """
    what = f"source: got {_name(source)}"
    if type(source).__module__.startswith("vllm.") and type(source).__name__ in _OF_MODULES:
        module = getattr(source, "_module", None)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"{what} without the attribute _module of vLLM 0.32 and 0.33")
        return module_arguments(module)
    metadata = getattr(source, "metadata", None)
    if isinstance(metadata, Sequence) and hasattr(source, "implements_iter_local"):
        if not source.implements_iter_local():
            raise TypeError(f"{what}, which does not implement iter_local(); {_EXPECTED}")
        return SenderArguments(_DeclaredShards(lambda: _of_033(source), source.iter_local))
    if callable(metadata) and callable(getattr(source, "mesh", None)):
        return SenderArguments(_DeclaredShards(lambda: _of_m2n(source), lambda: iter(source)))
    if callable(metadata) and isinstance(source, Iterable):
        raise TypeError(f"{what}, which yields full tensors; {_EXPECTED}")
    raise TypeError(f"{what}; {_EXPECTED}")


def module_arguments(module: torch.nn.Module) -> SenderArguments:
    """Return a module's own shards, of every layout; PEFT's adapters are merged as they travel."""
    model = unwrap_peft(module)
    config = model.config.to_dict() if isinstance(model, PreTrainedModel) else {}
    return SenderArguments(partial(parameter_shards, model), partial(adapter_shards, model), config)


def _name(source: Any) -> str:
    return "None" if source is None else f"a {type(source).__module__}.{type(source).__name__}"


class _Declared(NamedTuple):
    """One parameter. owners: ranks, row-major over the mesh. dims: sharded by each mesh axis."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    dims: tuple[int | None, ...]


def _of_033(source: Any) -> Iterator[_Declared]:
    everybody = tuple(range(dist.get_world_size()))
    for meta in source.metadata:
        owners = everybody if meta.owners is None else tuple(meta.owners)
        mesh_shape = tuple(meta.mesh_shape or (len(owners),))
        placements = meta.placements or (None,) * len(mesh_shape)
        dims = tuple(_sharded_dim(meta.name, placement) for placement in placements)
        yield _Declared(meta.name, meta.dtype, tuple(meta.shape), owners, mesh_shape, dims)


def _sharded_dim(name: str, placement: Any) -> int | None:
    kind = type(placement).__name__
    if kind not in ("NoneType", "Replicate", "Shard"):
        raise LayoutError(
            f"the weight source declares the placement {placement} of {name!r}; expected Replicate "
            "or Shard, the placements of vLLM 0.33"
        )
    return placement.dim if kind == "Shard" else None


def _of_m2n(source: Any) -> Iterator[_Declared]:
    """Read what vLLM 0.32 declares for its backend nccl_m2n; a negative placement replicates."""
    mesh = source.mesh()
    mesh_shape = tuple(mesh.dims)
    owners = tuple(mesh.start_rank + i for i in range(mesh_shape[0] * mesh_shape[1]))
    for meta in source.metadata():
        codes = meta.placements or (-1, -1)
        dims = tuple(None if code < 0 else code for code in codes)
        yield _Declared(meta.name, meta.dtype, tuple(meta.shape), owners, mesh_shape, dims)


class _DeclaredShards:
    """Reads the shards that a source yields, as DTensors of the placements that it declares.

    declared: reads the declarations.
    local: iterates over (name, this rank's part), in the same order.
    Collective over the trainer ranks, all of which hold a part of every parameter.
    """

    def __init__(
        self,
        declared: Callable[[], Iterable[_Declared]],
        local: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    ) -> None:
        self._declared, self._local = declared, local
        self._meshes: dict[tuple[tuple[int, ...], tuple[int, ...], str], DeviceMesh] = {}

    def __call__(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for meta, pair in zip_longest(self._declared(), self._local()):
            if meta is None or pair is None or pair[0] != meta.name:
                raise LayoutError(
                    f"the weight source yields {pair and pair[0]!r} where its metadata declares "
                    f"{meta and meta.name!r}; both must have the same parameters in one order"
                )
            name, local = pair
            if local.dtype != meta.dtype:
                raise LayoutError(
                    f"the weight source yields {name!r} in {local.dtype}, but its metadata "
                    f"declares {meta.dtype}"
                )
            tensors[name] = self._tensor(meta, local.detach())
        return tensors

    def _tensor(self, meta: _Declared, local: torch.Tensor) -> torch.Tensor:
        if sorted(meta.owners) != list(range(dist.get_world_size())):
            raise LayoutError(
                f"the weight source declares the ranks {meta.owners} as owners of {meta.name!r}; "
                f"expected each of the {dist.get_world_size()} trainer ranks to own a part of "
                "every parameter (no pipeline parallelism)"
            )
        if all(dim is None for dim in meta.dims):
            if tuple(local.shape) != meta.shape:
                raise LayoutError(
                    f"the weight source yields {meta.name!r} of shape {tuple(local.shape)}, but "
                    f"its metadata declares {meta.shape} on every rank"
                )
            return local
        key = meta.owners, meta.mesh_shape, local.device.type
        if key not in self._meshes:
            ranks = torch.tensor(meta.owners).view(meta.mesh_shape)
            self._meshes[key] = DeviceMesh(local.device.type, ranks)
        placements = [Replicate() if dim is None else Shard(dim) for dim in meta.dims]
        shape, strides = torch.Size(meta.shape), contiguous_strides(meta.shape)
        return DTensor.from_local(
            local, self._meshes[key], placements, run_check=False, shape=shape, stride=strides
        )


class EngineSender:
    """Sends a model to the workers of engines in other processes. On every trainer rank.

    host, port: of the store, which trainer rank 0 opens, as the workers reach it. port 0: a free
      one.
    bucket_bytes, timeout_s: as `WeightSender`.

    Collective. Raises ReshardError, on every rank, without HYBRIDENGINE_SECRET or if the store
    cannot be opened or reached.
    """

    def __init__(
        self, host: str, *, port: int = 0, bucket_bytes: int | None = None, timeout_s: float = 300.0
    ) -> None:
        self._host, self._bucket_bytes, self._timeout_s = host, bucket_bytes, timeout_s
        self._store: dist.Store | None = self._open_store(port)
        self._model: tuple[SenderArguments, int] | None = None
        self.sender: WeightSender | None = None

    def _open_store(self, wanted: int) -> dist.Store:
        host, timeout = self._host, timedelta(seconds=self._timeout_s)
        store: dist.TCPStore | None = None

        def listen() -> None:
            nonlocal store
            check_secret("the workers of the engines verify by it what the trainers tell them")
            if dist.get_rank() == 0:
                store = listening_store(host, wanted)

        def connect() -> dist.TCPStore:
            return store or dist.TCPStore(host, self.port, is_master=False, timeout=timeout)

        what = f"at master_address={host!r}, master_port={wanted},"
        run_on_all_ranks(listen, ReshardError, f"opening a store {what}")
        self.port = broadcast_value(store.port if store else 0, int)
        return run_on_all_ranks(connect, ReshardError, f"connecting to the store {what}")

    def join_info(self, index: int) -> dict[str, Any]:
        """Return the init info of the workers of engine number `index` (`StoreInfo`)."""
        return {
            "host": self._host,
            "port": self.port,
            "prefix": PREFIX,
            "index": index,
            "timeout_s": self._timeout_s,
        }

    def set_model(self, model: SenderArguments, num_engines: int) -> None:
        """Choose what is sent, and to how many engines (of trainer rank 0). Collective.

        Raises LayoutError for a model that cannot be sent.
        """
        if self._store is None:
            raise RuntimeError("the connections to the engines were ended")
        num_engines = broadcast_value(num_engines, int)
        self._model = model, num_engines
        self.sender = WeightSender(
            store=dist.PrefixStore(PREFIX, self._store),
            num_engines=num_engines,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            **model._asdict(),
        )

    def send(self, version: int, absent: Absent | None = None) -> SyncReport:
        """Send the current weights to all engines. Collective.

        absent: as `WeightSender.sync`, whose errors it raises. Plans again where the parameters
        have changed.
        """
        assert self.sender is not None and self._model is not None
        try:
            return self.sender.sync(version, absent=absent)
        except PlanOutdatedError:  # on every rank
            self.set_model(*self._model)
            return self.sender.sync(version, absent=absent)

    def ended(self, engine: int) -> str:
        """Return which workers of an engine have ended, as `WeightSender.ended`."""
        with suppress(ReshardError, MessageError):  # of the store: the next sync raises it
            return self.sender.ended(engine) if self.sender is not None else ""
        return ""

    def close(self) -> None:
        """End the connections to the engines, whose weights stay as they are."""
        self.sender = self._store = None
