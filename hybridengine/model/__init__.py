"""Hugging Face causal LMs, unchanged: load as FSDP2 shards, run packed, optimize, offload."""

from hybridengine.model.exact import use_exact_operators
from hybridengine.model.forward import (
    packed_cross_entropy,
    packed_log_probs,
    packed_logits,
    packed_policy_loss,
    packed_values,
)
from hybridengine.model.fsdp import on_device, sharding_mesh
from hybridengine.model.head import KeptIds, accepts_head_function
from hybridengine.model.loading import LoadOptions, is_sequence_classifier, load_causal_lm
from hybridengine.model.lora import adapter_shards, adapters_disabled, apply_lora, check_lora
from hybridengine.model.optim import Optimizer, SkippedUpdate
from hybridengine.model.packed import PackedBatch, SavedWork, pack_batch, pack_rollouts
from hybridengine.model.parameters import free_gathered, frozen_parameters, parameter_shards
from hybridengine.model.shared_parameters import SharedParameters
from hybridengine.model.validation import check_sequence_parallel

__all__ = [
    "KeptIds",
    "LoadOptions",
    "Optimizer",
    "PackedBatch",
    "SavedWork",
    "SharedParameters",
    "SkippedUpdate",
    "accepts_head_function",
    "adapter_shards",
    "adapters_disabled",
    "apply_lora",
    "check_lora",
    "check_sequence_parallel",
    "free_gathered",
    "frozen_parameters",
    "is_sequence_classifier",
    "load_causal_lm",
    "on_device",
    "pack_batch",
    "pack_rollouts",
    "packed_cross_entropy",
    "packed_log_probs",
    "packed_logits",
    "packed_policy_loss",
    "packed_values",
    "parameter_shards",
    "sharding_mesh",
    "use_exact_operators",
]
