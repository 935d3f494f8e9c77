"""What of TRL, accelerate and vLLM refuses a CPU, replaced in the processes of `trl_ranks`.

- accelerate applies FSDP on accelerators only: `let_accelerate_shard`.
- TRL's own weight sync broadcasts over NCCL: `let_trl_broadcast` and, in the server,
  `GlooTransfer`, broadcast the same tensors in the same order over gloo.
- AsyncGRPOTrainer computes attention with FlashAttention 3, and asks for the peak rate of its GPU:
  `attend`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=5)
MOVED = {"received": 0, "sent": 0}  # bytes of TRL's own sync: gathered, and broadcast by rank 0


def replace(sync: str) -> None:
    """sync: whose weight sync runs, "trl" or "hybridengine"."""
    let_accelerate_shard()
    trainer, packing = (
        _module(f"experimental.async_grpo.{name}") for name in ("async_grpo_trainer", "packing")
    )
    trainer.get_peak_flops_per_device = lambda *args: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    if sync == "trl":
        let_trl_broadcast()


def _module(name: str) -> Any:
    return importlib.import_module(f"trl.{name}")


def let_accelerate_shard() -> None:
    """Let accelerate apply FSDP on CPU ranks, as on those of a GPU."""
    from accelerate.state import AcceleratorState, DistributedType

    init = AcceleratorState.__init__

    def init_and_shard(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        plugin = self.__dict__.setdefault("fsdp_plugin", fsdp_plugin)  # kept by later instances
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = init_and_shard


class GlooGroup:
    """What TRL and vLLM need of a communicator between rank 0 and the workers of a server."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0)
        self.group = SimpleNamespace()  # TRL clears attributes of it
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._gloo.broadcast([tensor], options).wait()


def let_trl_broadcast() -> None:
    """Let TRL's own sync run on the CPU, and count its bytes in `MOVED`."""
    from torch.distributed.tensor import DTensor

    weight_transfer = _module("experimental.async_grpo.weight_transfer")
    vllm_client, sharded = _module("generation.vllm_client"), cast(Any, DTensor)

    def endpoint(info: dict[str, Any]) -> GlooGroup:
        return GlooGroup(info["master_address"], info["master_port"], 0, info["world_size"])

    def produce(
        iterator: Iterator[tuple[str, Tensor]],
        group: GlooGroup,
        src: int,
        post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
    ) -> None:
        for item in iterator:
            tensor = post_iter_func(item).detach().contiguous()
            group.broadcast(tensor, src)
            MOVED["sent"] += tensor.nbytes

    for module in (vllm_client, weight_transfer):
        module.open_trainer_endpoint = endpoint
        module.packed_nccl_broadcast_producer = produce
    # `init_communicator` compares the type of the device.
    gpu = SimpleNamespace(type="cuda", index=None)
    vllm_client.torch = SimpleNamespace(device=lambda *args: gpu)
    full_tensor = DTensor.full_tensor

    def gather(self: DTensor, *args: Any, **options: Any) -> Tensor:
        full = full_tensor(self, *args, **options)
        MOVED["received"] += full.nbytes - self.to_local().nbytes
        return full

    sharded.full_tensor = gather


def register_gloo_transfer() -> None:
    """In a server: receive over gloo where TRL's command line names NCCL."""
    import vllm._custom_ops as ops
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class GlooTransfer(NCCLWeightTransferEngine):
        """vLLM's loader gets each full tensor; nothing was packed away that it has to restore."""

        def init_transfer_engine(self, info: Any) -> None:
            rank = info.rank_offset + self.parallel_config.rank
            place = info.master_address, info.master_port, rank, info.world_size
            self._group = GlooGroup(*place)

        def start_weight_update(self) -> None: ...

        def finish_weight_update(self) -> None: ...

        def receive_weights(self, update_info: Any) -> None:
            model: Any = self.model
            for name, dtype, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            ):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                self._group.broadcast(tensor, 0)
                model.load_weights([(name, tensor)])

        def shutdown(self) -> None: ...

    ops._supports_onednn = False  # else a CPU's linear layers pack their weights away
    WeightTransferEngineFactory._registry["nccl"] = lambda: GlooTransfer


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    **options: Any,
) -> Tensor:
    """Compute causal attention of packed segments; the last query sees the last key of its own.

    query: [T, H, D]. key, value: [K, H_kv, D].
    """
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outputs = []
    for i in range(len(starts_q) - 1):
        q = query[starts_q[i] : starts_q[i + 1]].transpose(0, 1)
        k, v = (x[starts_k[i] : starts_k[i + 1]].transpose(0, 1) for x in (key, value))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        mask = mask.tril(k.shape[1] - q.shape[1])
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], mask, scale=softmax_scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(outputs)
