"""vLLM engines, sharded models and reshards between them, for tests on ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engines import engine_options
from tests.loading import load_sharded

__all__ = [
    "PROMPTS",
    "LargestAllocation",
    "build",
    "build_engine",
    "build_llm",
    "unequal",
    "vllm_model",
]

PROMPTS = [[1, 5, 9, 33, 2], [7, 8, 9, 10, 11, 12, 13], [3] * 20, [97, 4]]


def build(
    path: str,
    tp_size: int,
    dtype: torch.dtype,
    bucket_bytes: int,
    adapt: Callable | None = None,
    lora_rank: int = 0,
    fsdp_size: int = -1,
    quantization: str | None = None,
    **options: Any,
) -> tuple:
    """Return (VllmEngine, sharded model, Resharder). options: of `load_sharded`."""
    import torch.distributed as dist

    from hybridengine.model import (
        frozen_parameters,
        parameter_shards,
        sharding_mesh,
    )
    from hybridengine.model.lora import adapter_shards
    from hybridengine.sync.resharder import Resharder

    engine, checkpoint = build_engine(path, tp_size, dtype, lora_rank, quantization)
    sliced = engine.target.layout.sliced_dims(checkpoint.parameters)
    model = load_sharded(
        path,
        mesh=sharding_mesh("cpu", dist.get_world_size(), fsdp_size),
        shard_dim1=lambda name: sliced.get(name) == 1,
        adapt=adapt,
        **options,
    )
    resharder = Resharder(
        lambda: parameter_shards(model),
        engine,
        bucket_bytes,
        lambda: adapter_shards(model),
        merge=not lora_rank,
        frozen=lambda: frozen_parameters(model),
    )
    return engine, model, resharder


def build_engine(
    path: str, tp_size: int, dtype: torch.dtype, lora_rank: int = 0, quantization: str | None = None
) -> tuple:
    """Return (VllmEngine, layout of the checkpoint)."""
    from transformers import AutoConfig

    from hybridengine.engine.vllm.engine import VllmEngine
    from hybridengine.model.parameters import checkpoint_layout_from_config
    from hybridengine.vision import load_image_preparer

    config = AutoConfig.from_pretrained(path)
    checkpoint = checkpoint_layout_from_config(config)
    options = engine_options(
        path,
        checkpoint=checkpoint,
        tensor_model_parallel_size=tp_size,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=128,
        kv_cache_gib=64 / 1024,
        adapter_rank=lora_rank,
        quantization=quantization,
        preparer=load_image_preparer(config, path, {}),
    )
    engine = VllmEngine(options)
    return engine, checkpoint


def vllm_model(
    rank: int, world_size: int, path: str, tp_size: int, checkpoint: Any, **options: Any
) -> tuple[Any, Any]:
    """Return vLLM's bfloat16 model of this rank, without an engine: (its layout, the model).

    options: of vLLM's engine.
    """
    from hybridengine.engine.vllm.environment import (
        models_inspected_here,
        prepare_environment,
        unique_shared_memory,
    )
    from hybridengine.engine.vllm.weights import record_engine_layout

    prepare_environment()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments = EngineArgs(
        model=path,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        tensor_parallel_size=tp_size,
        distributed_executor_backend="external_launcher",
        enforce_eager=True,
        **options,
    )
    with models_inspected_here():
        config = arguments.create_engine_config()
    with set_current_vllm_config(config), unique_shared_memory():
        parallel_state.init_distributed_environment(world_size, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(tp_size)
        layout = record_engine_layout(config, checkpoint, torch.bfloat16)
        with set_default_torch_dtype(torch.bfloat16):
            return layout, initialize_model(vllm_config=config)


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest tensor that an operator creates while it is active."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        fresh = isinstance(result, torch.Tensor) and not func._schema.is_mutable
        if fresh and not func.is_view:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


def build_llm(path: str, **options: Any) -> Any:
    """Return a plain vLLM `LLM` (not our engine) with our weight-transfer backend."""
    from hybridengine.engine.vllm.environment import (
        models_inspected_here,
        prepare_environment,
        unique_shared_memory,
    )
    from hybridengine.remote.vllm_transfer.transfer import register

    prepare_environment()
    from vllm import LLM

    register()  # as the entry point does in an installed package
    with models_inspected_here(), unique_shared_memory():  # tests run in parallel
        return LLM(
            path,
            load_format="dummy",
            distributed_executor_backend="external_launcher",
            weight_transfer_config={"backend": "hybridengine"},
            dtype="bfloat16",
            enforce_eager=True,
            skip_tokenizer_init=True,
            **options,
        )


def unequal(weights: Mapping[str, torch.Tensor], load: Callable[[], object]) -> list[str]:
    """Return which of `weights` differ from what `load` writes into them."""
    before = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in weights.values():
        tensor.fill_(float("nan"))
    load()
    return [name for name, tensor in weights.items() if not torch.equal(tensor, before[name])]
