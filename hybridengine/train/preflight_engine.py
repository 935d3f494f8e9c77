"""Check the configuration of the rollout engine against the model and the machine.

A part of `hybridengine.train.preflight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from transformers import PretrainedConfig

from hybridengine.engine.vllm.environment import CPU_HEAD_SIZES, prepare_environment
from hybridengine.engine.vllm.options import check_engine_options, check_plugins
from hybridengine.model.parameters import checkpoint_layout_from_config
from hybridengine.model.validation import head_size, longest_sequence
from hybridengine.run.config import ConfigError, RLConfig
from hybridengine.run.errors import UserError
from hybridengine.run.host_memory import total_memory
from hybridengine.train.algorithms import uses_critic
from hybridengine.train.build import num_shards

_GIB = 2**30
_MASTER, _MOMENTS = 4, 8  # bytes of a weight and of its state in AdamW, float32


def check_engine(config: RLConfig, name: str) -> None:
    """Check what needs no model: what the engine `name` can do and be given.

    Raises ConfigError with every fault.
    """
    if config.rollout.servers:
        return
    faults = [*(_plain_generate(config) if name == "hf" else _vllm(config))]
    if faults:
        raise ConfigError(*faults)


def _plain_generate(config: RLConfig) -> Iterator[str]:
    """Yield what only vLLM can do."""
    rollout, advice = config.rollout, "but the engine is plain generate; set rollout.name=vllm"
    if rollout.tensor_model_parallel_size > 1:
        yield (
            f"rollout.tensor_model_parallel_size is {rollout.tensor_model_parallel_size}, {advice} "
            "(`make setup` installs it), or 1"
        )
    if config.reshard.lora == "adapters":
        yield f"reshard.lora is adapters, {advice} (`make setup` installs it), or merged"
    if rollout.engine_kwargs.vllm:
        options = dict(rollout.engine_kwargs.vllm)
        yield f"rollout.engine_kwargs.vllm is {options}, {advice}, or remove it"
    if rollout.quantization:
        yield f"rollout.quantization is {rollout.quantization}, {advice}, or remove it"


def _vllm(config: RLConfig) -> Iterator[str]:
    """Yield what vLLM cannot be given."""
    rollout = config.rollout
    if rollout.quantization and rollout.dtype == "float32":
        yield (
            f"rollout.quantization is {rollout.quantization} and rollout.dtype is float32, but "
            "vLLM quantizes 16-bit weights; set rollout.dtype=bfloat16"
        )
    ranks = rollout.n_gpus_per_node if config.overlaps else config.trainer.n_gpus_per_node
    total, memory = rollout.kv_cache_gib * ranks, total_memory() / 2**30
    if not torch.cuda.is_available() and total > memory:
        yield (
            f"rollout.kv_cache_gib is {rollout.kv_cache_gib:g} on each of {ranks} ranks, "
            f"{total:.1f} GiB in all, but this machine has {memory:.1f} GiB of memory; lower it"
        )
    for check in (prepare_environment, check_plugins):
        try:
            check()
        except UserError as error:
            yield str(error)
    if rollout.engine_kwargs.vllm:
        try:
            check_engine_options(rollout.engine_kwargs.vllm)
        except UserError:  # of the environment, as above
            pass
        except ValueError as error:
            yield f"rollout.engine_kwargs.vllm: {error}"


def check_model_in_engine(
    config: RLConfig, model: PretrainedConfig, name: str, shares: bool
) -> None:
    """Check that vLLM's attention on a CPU fits the model, or that a GPU holds the weights.

    shares: the trainer computes with the engine's weights.
    """
    if not config.rollout.servers and name == "vllm":
        if torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory
            check_device_memory(config, model, memory, shares)
        else:
            check_head_size(model)


def check_heads(config: RLConfig, model: PretrainedConfig) -> None:
    """Check the tensor-parallel size against attention heads and key-value heads."""
    text, tp_size = model.get_text_config(), config.rollout.tensor_model_parallel_size
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads

    def fits(size: int) -> bool:  # fewer key-value heads than ranks are replicated evenly
        return heads % size == 0 and max(kv_heads, size) % min(kv_heads, size) == 0

    if not fits(tp_size):
        fitting = [size for size in range(1, heads + 1) if fits(size)]
        raise ConfigError(
            f"rollout.tensor_model_parallel_size is {tp_size}, which does not divide the model's "
            f"{heads} attention heads ({kv_heads} key-value heads); choose one of {fitting}"
        )


def check_sequence_length(config: RLConfig, model: PretrainedConfig) -> None:
    """Check the longest sequence against the positions of the model."""
    lengths = "data.max_prompt_length or data.max_response_length"
    key = "rollout.max_model_len" if config.rollout.max_model_len else lengths
    check_length(model, config.max_model_len, "the longest sequence", key)


def check_head_size(model: PretrainedConfig) -> None:
    """Check that vLLM's attention on a CPU has heads of the model's size."""
    text = model.get_text_config()
    size = head_size(model)
    latent = getattr(text, "kv_lora_rank", None)  # attention over latent vectors has other sizes
    if latent is None and size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"rollout.name is vllm, whose attention on a CPU has no heads of size {size}, the "
            f"model's head_dim (it has {', '.join(map(str, CPU_HEAD_SIZES))}); set rollout.name=hf,"
            " or use a GPU"
        )


def check_device_memory(
    config: RLConfig, model: PretrainedConfig, memory: float, shares: bool
) -> None:
    """Check that the engine's share of a GPU holds its weights and leaves room for the trainer's.

    memory: bytes of the GPU.
    shares: the trainer computes with the engine's weights.
    """
    rollout = config.rollout
    shapes = checkpoint_layout_from_config(model, config.model.trust_remote_code).parameters
    numel = sum(map(math.prod, shapes.values()))
    weights = numel / rollout.tensor_model_parallel_size * getattr(torch, rollout.dtype).itemsize
    share = rollout.gpu_memory_utilization
    shown = f"rollout.gpu_memory_utilization is {share:g} of {memory / _GIB:.1f} GiB"
    if weights > share * memory:
        raise ConfigError(
            f"{shown}, less than the engine's weights of {weights / _GIB:.1f} GiB per rank; "
            "raise it, or rollout.tensor_model_parallel_size"
        )
    resident = 0.0 if config.overlaps else resident_bytes(config, numel, shares)
    if share * memory + resident > memory:
        raise ConfigError(
            f"{shown}, but the trainer keeps {resident / _GIB:.1f} GiB per rank on the same GPU "
            "while the engine generates; lower it, set actor.fsdp_config.param_offload or "
            "actor.fsdp_config.optimizer_offload, or use more ranks"
        )


def resident_bytes(config: RLConfig, numel: int, shares: bool) -> float:
    """Return the least that the trainer's shards take on a rank's GPU while an engine generates.

    numel: weights of the policy; the critic is taken to be as large.
    shares: the trainer computes with the engine's weights.
    """
    fsdp, is_full = config.actor.fsdp_config, not config.model.lora_rank
    critics = uses_critic(config) and not config.num_critic_ranks
    frozen = config.uses_reference and is_full
    own = is_full or not shares  # no base in the engine's weights
    of_weight = 0 if fsdp.param_offload else _MASTER * (own + frozen + critics)
    of_weight += 0 if fsdp.optimizer_offload else _MOMENTS * (is_full + critics)
    return of_weight * numel / num_shards(config)


def check_length(model: PretrainedConfig, length: int, what: str, key: str) -> None:
    limit = longest_sequence(model)
    if limit is not None and length > limit:
        raise ConfigError(
            f"{what} has {length} tokens, but the model was made for {limit} "
            f"(max_position_embeddings); lower {key}"
        )
