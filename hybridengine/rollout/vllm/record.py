"""Recording vLLM's loader: for a running engine, or for every TP rank from config.json alone."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from hybridengine.reshard.record.layers import record_engine
from hybridengine.sharding.layout import Checkpoint, EngineLayout

__all__ = ["record_engine_layouts", "record_vllm", "unused_parameters"]


class _Unallocated(TorchFunctionMode):
    """Uninitialised tensors, which is how weights begin, take no memory: they are on meta.

    Everything else stays real, because some models compute with constants as they are built.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if func in _UNINITIALISED:
            kwargs |= {"device": "meta", "pin_memory": False}
        return func(*args, **kwargs)


_UNINITIALISED = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


def record_vllm(vllm_config: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> EngineLayout:
    """Build the engine's model once more, without its weights, and record its loader there."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}  # else "Duplicate layer name"
    device = config.device_config.device  # as vLLM's own loader; _Unallocated goes before it
    with set_default_torch_dtype(dtype), torch.device(device), _Unallocated():
        model = initialize_model(vllm_config=config)
        return record_engine(model, model.load_weights, checkpoint, dtype)


def unused_parameters(checkpoint: Checkpoint) -> frozenset[str]:
    """What vLLM's loader may leave out: stored buffers, and the rest of a vision tower behind the
    layer whose features are used (`vision_feature_layer`), through which no gradient comes."""
    if "vision_feature_layer" not in checkpoint.config:
        return checkpoint.buffers
    return checkpoint.buffers | {n for n in checkpoint.parameters if "vision_tower." in n}


def record_engine_layouts(
    model_path: str, tp_size: int, trust_remote_code: bool = False
) -> tuple[dict[str, tuple[int, ...]], list[EngineLayout]]:
    """Trained parameter shapes, and vLLM's layout for every TP rank, from config.json alone.

    One process plays each TP rank in turn; nothing is allocated.
    """
    from hybridengine.rollout.vllm.engine import prepare_environment, vllm_available

    if not vllm_available():
        raise ImportError("the reshard advisor records vLLM's own loader; install vllm first")
    prepare_environment()
    from transformers import AutoConfig
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs

    from hybridengine.reshard.record.checkpoint import checkpoint_layout
    from hybridengine.rollout.vllm.record import record_vllm

    hf_config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    checkpoint = checkpoint_layout(hf_config, trust_remote_code)
    with _world_of_one():
        config = EngineArgs(
            model=model_path,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            tensor_parallel_size=tp_size,
            distributed_executor_backend="external_launcher",
            enforce_eager=True,
            trust_remote_code=trust_remote_code,
        ).create_engine_config()
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
            parallel_state.initialize_model_parallel(1)
        group = parallel_state.get_tp_group()
        group.world_size = tp_size
        layouts = []
        for group.rank_in_group in range(tp_size):
            layouts.append(record_vllm(config, checkpoint, torch.bfloat16))
    return checkpoint.parameters, layouts


@contextmanager
def _world_of_one() -> Iterator[None]:
    """A process group of this process alone, which vLLM's model code asks for its place."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    before = {name: os.environ.get(name) for name in rank}
    os.environ.update(rank)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        cleanup_dist_env_and_memory()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
