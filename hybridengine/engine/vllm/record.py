"""Record vLLM's loader for a running engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hybridengine.engine.vllm.environment import (
    own_model_classes,
)
from hybridengine.sync.layout import CheckpointLayout, EngineLayout
from hybridengine.sync.loader import record_layout_by_layer


def record_engine_layout(
    vllm_config: Any, checkpoint: CheckpointLayout, dtype: torch.dtype
) -> EngineLayout:
    """Return the layout of vLLM's model on the current TP rank, as if it were not quantized.

    The model is built once more without weights, and its loader recorded there.
    """
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    config.quant_config = None
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}  # else "Duplicate layer name"
    device = config.device_config.device  # as vLLM's loader; _UninitializedOnMeta takes precedence
    with (
        set_default_torch_dtype(dtype),
        torch.device(device),
        _UninitializedOnMeta(),
        own_model_classes(),
    ):
        model = initialize_model(vllm_config=config)
        return record_layout_by_layer(model, model.load_weights, checkpoint, dtype)


class _UninitializedOnMeta(TorchFunctionMode):
    """Create uninitialised tensors, as which weights begin, on the meta device.

    All others stay real, because some models compute with constants while they are built.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _UNINITIALIZED:
            kwargs |= {"device": "meta", "pin_memory": False}
        return func(*args, **kwargs)


_UNINITIALIZED = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
