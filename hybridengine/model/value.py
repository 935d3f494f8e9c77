"""One number per position from any causal LM: its output head replaced by a linear layer [1, H].

A sequence classifier brings its own head; any other model starts with one of zeros, whose values
are 0 until it has learnt. Everything else, packing and sharding included, is the causal LM's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from hybridengine.errors import ModelError
from hybridengine.model.forward import PackedBatch, packed_logits
from hybridengine.model.ulysses import gather_rows

__all__ = ["is_sequence_classifier", "packed_values", "put_value_head", "read_model"]


def is_sequence_classifier(config: PretrainedConfig) -> bool:
    """Whether the checkpoint of `config` holds a classification head."""
    return any("SequenceClassification" in name for name in config.architectures or ())


def packed_values(model: nn.Module, batch: PackedBatch) -> Tensor:
    """float32 [R], the value at every one of `batch.logit_positions`."""
    values = packed_logits(model, batch)[:, 0]
    return values if batch.part is None else gather_rows(values, part=batch.part)[0]


def put_value_head(model: PreTrainedModel) -> None:
    """Replace the output head of a causal LM by Linear(H, 1) of zeros, on the head's device."""
    old = model.get_output_embeddings()
    weight = None if old is None else getattr(old, "weight", None)
    if weight is None:
        raise ModelError(f"{type(model).__name__} has no output head to put a value head for")
    head = nn.Linear(weight.shape[1], 1, bias=False, dtype=weight.dtype, device=weight.device)
    nn.init.zeros_(head.weight)
    model.set_output_embeddings(head)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
        if getattr(config, "final_logit_softcapping", None):  # of logits, not of values
            config.final_logit_softcapping = None


def read_model(
    path: str, config: PretrainedConfig, trust_remote_code: bool, value_head: bool
) -> PreTrainedModel:
    """The whole causal LM at `path` in float32; with `value_head` as `put_value_head` leaves it.

    Raises:
        ModelError: a classifier with several labels, or weights that are missing.
    """
    kind: Any = AutoModelForCausalLM
    classifies = value_head and is_sequence_classifier(config)
    if classifies:
        kind = AutoModelForSequenceClassification
        if config.num_labels != 1:
            raise ModelError(
                f"model {path!r} has {config.num_labels} labels; a reward or value model has one"
            )
    model, report = kind.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    if classifies:
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        head = causal.get_output_embeddings()
        name = next(n for n, module in causal.named_modules() if module is head)
        model.set_submodule(name, model.score)
        del model.score
    elif value_head:
        put_value_head(model)
    there = {name for name, _ in model.named_parameters()}
    if missing := sorted(there & set(report["missing_keys"])):
        raise ModelError(
            f"the checkpoint {path!r} lacks {len(missing)} weights of {type(model).__name__}, "
            f"such as {missing[0]!r}; use a complete checkpoint"
        )
    return model
