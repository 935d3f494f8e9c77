"""Everything about a run that can be known to be wrong before a rank starts, and its plan."""

from __future__ import annotations

import math

import torch
from rich.table import Table
from transformers import PretrainedConfig

from hybridengine.checkpoint import chosen_checkpoint
from hybridengine.config import ConfigError, GRPOConfig, SFTConfig
from hybridengine.data import PromptDataset, PromptLoader
from hybridengine.data.sft import SFTDataset
from hybridengine.model import (
    check_disk_space,
    check_model,
    check_sequence_parallel,
    checkpoint_shapes,
)
from hybridengine.tracking import check_loggers
from hybridengine.trainer.setup import engine_name, load_data
from hybridengine.trainer.sft import load_sft_data

__all__ = ["check_grpo", "check_sft", "plan_table"]

_PROBED_ROWS = 3  # the reward of an empty answer to the first prompts shows a broken function


def check_grpo(config: GRPOConfig) -> tuple[PromptDataset, PromptDataset | None]:
    """Check devices, model, disk, data and reward; loads no weights.

    Returns the training and the validation prompts. Raises ConfigError, ModelError, DataError or
    RewardError, with one sentence, for the first fault found.
    """
    model = _check_run(config)
    _check_heads(config, model)
    check_sequence_parallel(model, config.actor.ulysses_sequence_parallel_size)
    _, train, val, reward = load_data(config)
    PromptLoader(train, config.data.train_batch_size, seed=config.seed)
    for dataset in (train, val):
        if dataset is not None:
            probed = dataset[:_PROBED_ROWS]
            reward.score(probed, [""] * len(probed), [0] * len(probed))
    return train, val


def check_sft(config: SFTConfig) -> tuple[SFTDataset, SFTDataset | None]:
    """As `check_grpo`, for `hybridengine sft`: the training and the validation conversations."""
    check_sequence_parallel(_check_run(config), config.ulysses_sequence_parallel_size)
    _, train, val = load_sft_data(config)
    PromptLoader(train, config.data.train_batch_size, seed=config.seed)
    return train, val


def _check_run(config: GRPOConfig | SFTConfig) -> PretrainedConfig:
    """What every kind of training needs; returns the model's configuration."""
    trainer, trust = config.trainer, config.model.trust_remote_code
    ranks, devices = trainer.n_gpus_per_node, torch.cuda.device_count()
    if devices and ranks > devices:
        raise ConfigError(
            f"trainer.n_gpus_per_node is {ranks} but this machine has {devices} GPUs; lower it"
        )
    check_loggers(trainer.logger)
    chosen_checkpoint(trainer.default_local_dir, trainer.resume_mode, trainer.resume_from_path)
    model = check_model(config.model.path, trust)
    weights = sum(math.prod(shape) for shape in checkpoint_shapes(model, trust).values())
    check_disk_space(trainer.default_local_dir, weights * torch.bfloat16.itemsize)
    return model


def _check_heads(config: GRPOConfig, model: PretrainedConfig) -> None:
    """The tensor-parallel size divides the heads, and fits the key-value heads and the engine."""
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
    if engine_name(config) == "hf" and tp_size > 1:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size is {tp_size} but vLLM is not installed, and plain "
            "generate has no tensor parallelism; run `make setup`, or set it to 1"
        )


def plan_table(config: GRPOConfig, train: PromptDataset, val: PromptDataset | None) -> Table:
    """What the run is going to do, in numbers."""
    data, trainer, tp_size = config.data, config.trainer, config.rollout.tensor_model_parallel_size
    per_epoch = len(train) // data.train_batch_size
    steps = trainer.total_training_steps or trainer.total_epochs * per_epoch
    responses = data.train_batch_size * config.rollout.n
    updates = config.actor.ppo_epochs * (data.train_batch_size // config.ppo_mini_batch_size)
    dropped = f", {train.dropped} overlong ones dropped" if train.dropped else ""
    rows = {
        "model": config.model.path,
        "ranks": f"{config.world_size}; engine: {config.world_size // tp_size} replicas, "
        f"tensor parallel over {tp_size}",
        "training": f"{len(train)} prompts{dropped}, {per_epoch} steps per epoch, {steps} in all",
        "validation": f"{len(val)} prompts" if val is not None else "none",
        "per step": f"{data.train_batch_size} prompts, {responses} responses, "
        f"{updates} optimizer step{'s' if updates > 1 else ''}",
        "lengths": f"prompt up to {data.max_prompt_length}, response up to "
        f"{data.max_response_length} tokens",
        "micro-batch": f"up to {config.actor.ppo_max_token_len_per_gpu} tokens per rank",
        "written to": trainer.default_local_dir,
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", value)
    return table
