"""Record how transformers cuts a checkpoint from trained parameters."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hybridengine.model.parameters import (
    original_class,
    parameter_shards,
    unwrapped_name,
    use_checkpoint_names,
)
from hybridengine.model.validation import auto_class
from hybridengine.run.errors import ModelError
from hybridengine.sync.layout import CheckpointLayout, LayoutError
from hybridengine.sync.loader import record_checkpoint

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
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
        _layouts[key] = checkpoint_layout(model)
    return _layouts[key]


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
