"""Hugging Face causal LMs, unchanged: loaded onto FSDP2 shards, run packed, stepped, exported."""

from hybridengine.errors import ModelError
from hybridengine.model.attention import ATTENTION
from hybridengine.model.forward import PackedBatch, pack_rollouts, packed_log_probs, packed_logits
from hybridengine.model.loading import load_causal_lm, sharding_mesh
from hybridengine.model.lora import (
    adapter_shards,
    adapters_disabled,
    apply_lora,
    check_target_modules,
    save_adapter,
)
from hybridengine.model.offload import on_device
from hybridengine.model.optim import SCHEDULES, Optimizer, clip_grad_norm_
from hybridengine.model.parameters import parameter_shards
from hybridengine.model.ulysses import check_sequence_parallel, gather_rows
from hybridengine.model.value import is_sequence_classifier, packed_values

__all__ = [
    "ATTENTION",
    "SCHEDULES",
    "ModelError",
    "Optimizer",
    "PackedBatch",
    "adapter_shards",
    "adapters_disabled",
    "apply_lora",
    "check_sequence_parallel",
    "check_target_modules",
    "clip_grad_norm_",
    "gather_rows",
    "is_sequence_classifier",
    "load_causal_lm",
    "on_device",
    "pack_rollouts",
    "packed_log_probs",
    "packed_logits",
    "packed_values",
    "parameter_shards",
    "save_adapter",
    "sharding_mesh",
]
