"""The memory that a run is expected to take."""

from __future__ import annotations

import math

import torch

from hybridengine.model.validation import check_model
from hybridengine.run.config import RLConfig
from hybridengine.train.algorithms import uses_critic
from hybridengine.train.build import checkpoint_layout, engine_name
from hybridengine.train.build_models import num_shards
from hybridengine.train.performance import LayerShape

GIB = 2.0**30


def num_parameters(config: RLConfig, path: str = "") -> int:
    return sum(map(math.prod, checkpoint_layout(config, path).parameters.values()))


def itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def memory_gib(config: RLConfig, shares_base: bool) -> dict[str, float]:
    """Estimate the peak memory per rank of each part of the run.

    A trained weight takes 16 bytes: float32 master, gradient and two moments. Where layers are
    recomputed, the input of every layer is kept, and the activations of one.
    shares_base: the base of LoRA is the engine's weights.
    """
    model = check_model(config.model.path, config.model.trust_remote_code)
    shape = LayerShape.of(model, checkpoint_layout(config).parameters)
    numel = num_parameters(config)
    if config.model.enable_gradient_checkpointing:
        per_token = shape.hidden_size * shape.num_layers + shape.saved_elements
    else:
        per_token = shape.saved_elements * shape.num_layers
    per_token *= itemsize(config.sharding.dtype)
    tokens = max(
        config.actor.ppo_max_token_len_per_gpu,
        -(-config.max_sequence_length // config.sequence_parallel_size),
    )
    lora = config.model.lora_rank > 0  # frozen weights have neither gradients nor moments
    parts = {"policy": (4.0 if lora else 16.0) * numel * (not shares_base) / num_shards(config)}
    if config.uses_reference and not lora:
        parts["reference"] = 4.0 * numel / num_shards(config)
    if path := config.algorithm.distill.teacher_path:
        parts["teacher"] = 4.0 * num_parameters(config, path) / num_shards(config)
    if uses_critic(config) and not config.num_critic_ranks:
        parts["critic"] = 16.0 * numel / num_shards(config)
    parts["activations"] = per_token * tokens
    if not config.rollout.servers:
        engine = itemsize(config.rollout.dtype) * numel
        parts["engine weights"] = engine / config.rollout.tensor_model_parallel_size
    gib = {name: size / GIB for name, size in parts.items()}
    uses_cache = engine_name(config) == "vllm" and not config.rollout.servers
    if uses_cache and not torch.cuda.is_available():
        gib["cache"] = config.rollout.kv_cache_gib
    return gib
