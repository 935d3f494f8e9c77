"""The sharded weights of a model, and what its Hugging Face checkpoint makes of them."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightTransform,
)

from hybridengine.sharding.shards import local_shard

__all__ = ["is_finite", "name_as_checkpoint", "original_class", "parameter_shards", "without_peft"]


def original_class(model: nn.Module) -> type:
    """The class `model` had before FSDP2 put its own in front."""
    return next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))


def parameter_shards(model: nn.Module) -> dict[str, DTensor | torch.Tensor]:
    """Live parameters and persistent buffers by module name; tied ones once, under the first name.

    A DTensor is this rank's share of a parameter (a float32 master, no copy); a plain tensor is
    whole on every rank. Adapters are left out, and what they adapt has the name it has without
    them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass leaves the root's parameters whole
    stored = {
        _plain(name): parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                stored[_plain(f"{prefix}.{name}" if prefix else name)] = buffer
    return stored


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element (of a DTensor: of this rank's shard) is NaN or infinite."""
    local = local_shard(tensor)
    if not local.is_floating_point() or not local.numel():
        return True
    return bool(torch.stack(local.aminmax()).isfinite().all())  # in one pass, without a mask


def without_peft(model: nn.Module) -> nn.Module:
    """The Hugging Face model itself, sharded again by every FSDP2 module around or inside it."""
    parameter_shards(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _plain(name: str) -> str:
    """A parameter's name without what wraps its module."""
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod.", "base_layer."):
        name = name.replace(wrapper, "")
    return name


def name_as_checkpoint(model: PreTrainedModel) -> None:
    """Let transformers save `model` with the names and shapes that published checkpoints have.

    Those checkpoints, and so vLLM's loaders, keep `vision_model.` in the names of a vision tower,
    which transformers drops while loading and restores only for a model that it has loaded. A
    prefix of all names stays out, as in transformers: it depends on the model a checkpoint is from.
    They also keep some experts transposed, which transformers undoes while loading only.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        known = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [c for c in known if c.scope_prefix or not isinstance(c, PrefixChange)]
    model._weight_conversions = [_always_transposing(c) for c in conversions] or None


def _always_transposing(conversion: WeightTransform) -> WeightTransform:
    if not isinstance(conversion, WeightConverter):
        return conversion
    changed = copy.copy(conversion)
    changed.operations = [
        Transpose(op.dim0, op.dim1) if isinstance(op, Transpose) else op
        for op in conversion.operations
    ]
    return changed
