"""The plan of a run, known before it starts: choices, sizes, splits, memory and traffic."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from hybridengine.run.config import JobConfig, RLConfig, SFTConfig
from hybridengine.train.checkpoint import resume_plan
from hybridengine.train.choices import Choices
from hybridengine.train.data import PromptDataset, SFTDataset
from hybridengine.train.performance import GIB, memory_gib, num_parameters


def plan_table(config: JobConfig, train: Any, val: Any, choices: Choices) -> Table:
    """Describe a run. train, val: its datasets; val may be None."""
    describe: Any = _describe_sft if isinstance(config, SFTConfig) else _describe_rl
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in describe(config, train, val, choices).items():
        table.add_row(f"[bold]{name}", value)
    return table


def _describe_rl(
    config: RLConfig, train: PromptDataset, val: PromptDataset | None, choices: Choices
) -> dict[str, str]:
    data, trainer = config.data, config.trainer
    splits = config.overlaps and not config.rollout.servers
    per_epoch = len(train) // data.train_batch_size
    updates = config.actor.ppo_epochs * (data.train_batch_size // config.ppo_mini_batch_size)
    dropped = f", {train.dropped} overlong ones dropped" if train.dropped else ""
    sp_size = config.sequence_parallel_size
    max_tokens = config.actor.ppo_max_token_len_per_gpu * sp_size
    shared = f" shared by {sp_size} ranks" if sp_size > 1 else " on each rank"
    mini_batch_tokens = config.ppo_mini_batch_size * config.rollout.n * config.max_sequence_length
    replica_tokens = -(-mini_batch_tokens // config.data_parallel_size)
    memory = memory_gib(
        config,
        choices.model,
        choices.engine,
        shares_base=config.model.lora_rank > 0 and choices.shares,
        has_gpu=bool(choices.machine.gpu_bytes),
    )
    return {
        "model": config.model.path,
        "algorithm": _algorithm(config),
        "ranks": f"{config.world_size}{' that train' if config.overlaps else ''}; "
        + _engines(config),
        **_critic_rows(config),
        "precision": choices.reasons["dtypes"],
        "mesh": _mesh(config),
        "training": f"{len(train)} prompts{dropped}, {per_epoch} steps per epoch, "
        f"{trainer.steps(per_epoch)} in all",
        "validation": f"{len(val)} prompts" if val is not None else "none",
        "per step": f"{data.train_batch_size} prompts, "
        f"{data.train_batch_size * config.rollout.n} responses, "
        f"{updates} optimizer step{'s' if updates > 1 else ''}",
        "lengths": f"prompt up to {data.max_prompt_length}, response up to "
        f"{data.max_response_length} tokens",
        "micro-batch": f"up to {max_tokens} tokens{shared}, at most "
        f"{-(-replica_tokens // max_tokens)} per optimizer step",
        "engine": f"{choices.engine}: {choices.reasons['engine']}",
        "shared prefix": choices.reasons["prefix"],
        "shared weights": choices.reasons["shares"],
        "exact": choices.reasons["exact"],
        "delta": choices.reasons["delta"],
        "memory": ", ".join(f"{name} {size:.2f}" for name, size in memory.items())
        + " GiB per rank, estimated"
        + ("; engine weights and cache on engine ranks" if splits else ""),
        "written to": trainer.default_local_dir,
    }


def _describe_sft(
    config: SFTConfig, train: SFTDataset, val: SFTDataset | None, choices: Choices
) -> dict[str, str]:
    data, trainer = config.data, config.trainer
    per_epoch = len(train) // data.train_batch_size
    dropped = f", {train.dropped} overlong ones dropped" if train.dropped else ""
    tokens, trained = map(sum, zip(*((len(s.ids), s.num_loss_tokens) for s in train), strict=True))
    micro_batch = (
        f"{data.micro_batch_size_per_gpu} conversations"
        if data.micro_batch_size_per_gpu
        else f"up to {data.max_token_len_per_gpu} tokens"
    )
    return {
        "model": config.model.path,
        "ranks": f"{config.world_size}, {config.data_parallel_size} data parallel",
        "precision": choices.reasons["dtypes"],
        "training": f"{len(train)} conversations{dropped}, {tokens} tokens, "
        f"{trained} of them trained on",
        "validation": f"{len(val)} conversations" if val is not None else "none",
        "steps": f"{per_epoch} per epoch, {trainer.steps(per_epoch)} in all, "
        f"{data.train_batch_size} conversations each",
        "micro-batch": f"{micro_batch} per rank",
        "shared prefix": choices.reasons["prefix"],
        "written to": trainer.default_local_dir,
    }


def start_of(config: RLConfig | SFTConfig, num_samples: int) -> str:
    """Describe where the run starts: anew, after the step of a checkpoint, or not at all."""
    trainer = config.trainer
    plan = resume_plan(trainer.default_local_dir, trainer.resume_mode, trainer.resume_from_path)
    steps = trainer.steps(num_samples // config.data.train_batch_size)
    done = f"; all {steps} steps are done" if plan.step >= steps else ""
    return f"{plan}{done}"


def _algorithm(config: RLConfig) -> str:
    algorithm, distill = config.algorithm, config.algorithm.distill
    if config.distills:
        return f"distillation, beta {distill.beta:g}, from {distill.teacher_path}"
    return (
        f"{algorithm.adv_estimator}, {config.actor.policy_loss.loss_mode}, "
        f"{config.actor.loss_agg_mode}"
    )


def _engines(config: RLConfig) -> str:
    if config.rollout.servers:
        return f"vLLM servers: {', '.join(config.rollout.servers)}"
    text = (
        f"engine: {config.num_engines} replicas, tensor parallel over "
        f"{config.rollout.tensor_model_parallel_size}"
    )
    return text + (", on ranks of their own" if config.overlaps else "")


def _mesh(config: RLConfig) -> str:
    shards, sp_size = config.num_shards(), config.sequence_parallel_size
    copies = f"{config.world_size // shards} x " if shards < config.world_size else ""
    sequences = f", sequences over {sp_size} neighbours" if sp_size > 1 else ""
    return f"weights sharded over {copies}{shards}{sequences}"


def _critic_rows(config: RLConfig) -> dict[str, str]:
    """Describe a critic on ranks of its own, with its weights, gradients and moments."""
    if not config.num_critic_ranks:
        return {}
    shards = config.num_shards(config.num_critic_ranks)
    size = 16.0 * num_parameters(config, config.critic.model.path) / shards / GIB
    return {
        "critic": f"{config.num_critic_ranks} ranks of its own, weights sharded over {shards}, "
        f"{size:.2f} GiB per rank without activations"
    }
