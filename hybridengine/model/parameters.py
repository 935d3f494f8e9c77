"""The sharded parameters of a model, their names, and how its checkpoint is made of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    Transpose,
    WeightConverter,
    build_glob_alternation,
    revert_weight_conversion,
)

from hybridengine.model.extensions import hooks_of
from hybridengine.model.validation import config_of, meta_model
from hybridengine.run.config.common import TrainedModelConfig
from hybridengine.run.errors import ModelError
from hybridengine.sync.layout import CheckpointLayout, LayoutError
from hybridengine.sync.loader import record_checkpoint
from hybridengine.sync.shards import local_shard


def original_class(model: nn.Module) -> type:
    """Return the class of `model` before `fully_shard` changed it."""
    return next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))


def parameter_shards(model: nn.Module) -> dict[str, DTensor | torch.Tensor]:
    """Return parameters and persistent buffers by name, not copied; tied ones under one name.

    A DTensor is this rank's shard of a float32 master weight; a plain tensor is replicated. Adapter
    weights are left out, and their base weights have the names of the model without adapters.
    """
    free_gathered(model)
    stored = {
        unwrapped_name(name): parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                stored[unwrapped_name(f"{prefix}.{name}" if prefix else name)] = buffer
    return stored


def meta_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of the class and configuration of `model` in `dtype`, on the meta device."""
    model_class: Any = original_class(model)
    with torch.device("meta"):
        copied: PreTrainedModel = model_class._from_config(copy.deepcopy(model.config), dtype=dtype)
    return copied


def saved_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes, by name as in `parameter_shards`, in which transformers saves `model`.

    They are those in which it loads the model as one of `dtype`: some parameters, such as the
    biases of routers, stay in float32.
    """
    kept = model._get_dtype_plan(dtype)
    pattern, names, _ = build_glob_alternation(list(kept)) if kept else (None, {}, None)
    dtypes = {}
    for name, tensor in parameter_shards(meta_copy(model, dtype)).items():
        found = pattern.search(name) if pattern and tensor.is_floating_point() else None
        dtypes[name] = kept[names[str(found.lastgroup)]] if found else tensor.dtype
    return dtypes


def frozen_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names, as in `parameter_shards`, of the parameters that are not trained."""
    return frozenset(
        unwrapped_name(name) for name, p in model.named_parameters() if not p.requires_grad
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element (of a DTensor: of the local shard) is NaN or infinite."""
    local = local_shard(tensor)
    if not local.is_floating_point() or not local.numel():
        return True
    return bool(torch.stack(local.aminmax()).isfinite().all())  # one pass, no mask


def unwrap_peft(model: nn.Module) -> nn.Module:
    """Return the Hugging Face model inside PEFT's wrapper, with all FSDP2 modules resharded."""
    free_gathered(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def free_gathered(model: nn.Module) -> None:
    """Free the unsharded parameters that a forward pass without a backward has left.

    FSDP2 keeps those of the root (embedding and head) for the backward pass.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for hook in hooks_of(model):
        hook.restore()


def unwrapped_name(name: str) -> str:
    """Return a parameter's name without the prefixes of modules that wrap others."""
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod.", "base_layer."):
        name = name.replace(wrapper, "")
    return name


def use_checkpoint_names(model: PreTrainedModel) -> None:
    """Make transformers save `model` with the names and shapes of published checkpoints.

    These, and so vLLM's loaders, keep `vision_model.` in the names of a vision tower; transformers
    drops it while loading and restores it only for a model that it has loaded itself. A prefix of
    all names is not restored, as in transformers: it depends on the checkpoint the model is from.
    Published checkpoints also keep some experts transposed, which transformers undoes only while
    loading.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        known = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [c for c in known if c.scope_prefix or not isinstance(c, PrefixChange)]
    model._weight_conversions = [_with_transpose(c) for c in conversions] or None  # type: ignore[assignment]


def _with_transpose(conversion: Any) -> Any:
    if isinstance(conversion, WeightConverter):
        conversion = copy.copy(conversion)
        conversion.operations = [
            Transpose(op.dim0, op.dim1) if isinstance(op, Transpose) else op
            for op in conversion.operations
        ]
    return conversion


_layouts: dict[tuple[type[PretrainedConfig], str, bool], CheckpointLayout] = {}


def checkpoint_layout_from_config(
    config: PretrainedConfig, trust_remote_code: bool = False
) -> CheckpointLayout:
    """Return the checkpoint layout of the causal LM of `config`; reads no weights.

    The same object for equal configurations; it takes seconds where there are many experts.

    Raises:
        ModelError: a checkpoint tensor that is computed from parameters rather than copied.
    """
    key = type(config), config.to_json_string(use_diff=False), trust_remote_code
    if key not in _layouts:
        _layouts[key] = checkpoint_layout(meta_model(config, trust_remote_code))
    return _layouts[key]


def layout_of(model: TrainedModelConfig) -> CheckpointLayout:
    """Return the checkpoint layout of a job's model, see `checkpoint_layout_from_config`."""
    return checkpoint_layout_from_config(config_of(model), model.trust_remote_code)


def checkpoint_layout(model: PreTrainedModel) -> CheckpointLayout:
    """Return how transformers' own conversion makes the tensors that `save_pretrained` writes.

    Most checkpoint tensors are one parameter; an expert of a fused weight is a slice of one.

    Raises:
        ModelError: a checkpoint tensor that is computed from parameters rather than copied.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in parameter_shards(model).items()}
    use_checkpoint_names(model)
    try:
        layout = record_checkpoint(shapes, lambda full: revert_weight_conversion(model, full))
    except LayoutError as error:
        raise ModelError(f"{original_class(model).__name__} cannot be resharded: {error}") from None
    buffers = shapes.keys() & {unwrapped_name(name) for name, _ in model.named_buffers()}
    return replace(layout, buffers=frozenset(buffers), config=model.config.to_dict())
