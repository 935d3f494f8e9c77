"""How transformers cuts a checkpoint from trained parameters, recorded."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    revert_weight_conversion,
)

from hybridengine.errors import ModelError
from hybridengine.model.parameters import (
    _plain,
    name_as_checkpoint,
    original_class,
    parameter_shards,
)
from hybridengine.reshard.record.loader import record_checkpoint
from hybridengine.sharding.layout import Checkpoint, LayoutError

__all__ = ["checkpoint_layout", "describe_checkpoint"]


def checkpoint_layout(config: PretrainedConfig, trust_remote_code: bool = False) -> Checkpoint:
    """How the checkpoint of the causal LM of `config` is cut from its trained parameters.

    Raises:
        ModelError: a checkpoint tensor that is computed from parameters rather than copied.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return describe_checkpoint(model)


def describe_checkpoint(model: PreTrainedModel) -> Checkpoint:
    """How transformers' own conversion makes the tensors `save_pretrained` writes of `model`.

    Most checkpoint tensors are one parameter; an expert of a fused weight is a slice of one.

    Raises:
        ModelError: as `checkpoint_layout`.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in parameter_shards(model).items()}
    name_as_checkpoint(model)
    try:
        checkpoint = record_checkpoint(shapes, lambda whole: revert_weight_conversion(model, whole))
        buffers = frozenset(shapes.keys() & {_plain(name) for name, _ in model.named_buffers()})
        return replace(checkpoint, buffers=buffers, config=model.config.to_dict())
    except LayoutError as error:
        raise ModelError(f"{original_class(model).__name__} cannot be resharded: {error}") from None
