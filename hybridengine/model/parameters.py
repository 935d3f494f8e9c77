"""The sharded weights of a model, under the names of its Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hybridengine.model.errors import ModelError

__all__ = ["checkpoint_shapes", "original_class", "parameter_shards", "stored_tensors"]


def original_class(model: nn.Module) -> type:
    """The class `model` had before FSDP2 put its own in front."""
    return next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))


def stored_tensors(model: nn.Module) -> dict[str, DTensor | torch.Tensor]:
    """Parameters and persistent buffers by module name; tied ones once, under the first name."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass leaves the root's parameters whole
    stored = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.detach()
        for name, parameter in model.named_parameters()
    }
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                stored[f"{prefix}.{name}" if prefix else name] = buffer
    return stored


def parameter_shards(model: PreTrainedModel) -> dict[str, DTensor | torch.Tensor]:
    """Live shards (float32 masters, no copy) by the names `save_pretrained` would write.

    A DTensor is this rank's share of a parameter; a plain tensor is a buffer, whole on every rank.

    Raises:
        ModelError: a parameter that transformers merges or splits at loading (fused experts), and
            so has no single name in the checkpoint.
    """
    stored = stored_tensors(model)
    return {checkpoint: stored[name] for checkpoint, name in _checkpoint_names(model, stored)}


def checkpoint_shapes(
    config: PretrainedConfig, trust_remote_code: bool = False
) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> shape of the causal LM of `config`: the keys of `parameter_shards`.

    Raises:
        ModelError: as `parameter_shards`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    stored = stored_tensors(model)
    return {
        checkpoint: tuple(stored[name].shape)
        for checkpoint, name in _checkpoint_names(model, stored)
    }


def _checkpoint_names(
    model: PreTrainedModel, stored: dict[str, DTensor | torch.Tensor]
) -> Iterator[tuple[str, str]]:
    """(checkpoint name, module name) pairs, from transformers' own renaming of stand-ins."""
    with torch.device("meta"):
        stand_ins = {name: torch.empty(tensor.shape) for name, tensor in stored.items()}
    names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    for checkpoint_name, stand_in in revert_weight_conversion(model, stand_ins).items():
        if id(stand_in) not in names:
            raise ModelError(
                f"{original_class(model).__name__}: {checkpoint_name!r} is stored in a different "
                "shape than it is trained; such models cannot be resharded yet"
            )
        yield checkpoint_name, names[id(stand_in)]
