"""The plan of a run, known before it starts: data types, sizes, splits, memory and traffic.

`dtype: auto` is bfloat16 where the hardware multiplies it fast, else float32.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.table import Table

from hybridengine.kernels import has_fast_products
from hybridengine.run.config import Dtype, JobConfig, RLConfig, SFTConfig, keys_of
from hybridengine.train.build_models import num_shards
from hybridengine.train.checkpoint import resume_plan
from hybridengine.train.choices import unshared_reason
from hybridengine.train.data import PromptDataset, SFTDataset
from hybridengine.train.exact_rollouts import inexact_reason
from hybridengine.train.memory import GIB, memory_gib, num_parameters
from hybridengine.train.shared_prefix import no_sharing_reason

_Config = TypeVar("_Config", bound=JobConfig)


def plan_table(config: RLConfig, train: PromptDataset, val: PromptDataset | None) -> Table:
    """Describe an RL run."""
    data, trainer = config.data, config.trainer
    splits = config.overlaps and not config.rollout.servers
    per_epoch = len(train) // data.train_batch_size
    responses = data.train_batch_size * config.rollout.n
    updates = config.actor.ppo_epochs * (data.train_batch_size // config.ppo_mini_batch_size)
    dropped = f", {train.dropped} overlong ones dropped" if train.dropped else ""
    sp_size = config.sequence_parallel_size
    max_tokens = config.actor.ppo_max_token_len_per_gpu * sp_size
    shared = f" shared by {sp_size} ranks" if sp_size > 1 else " on each rank"
    mini_batch_tokens = config.ppo_mini_batch_size * config.rollout.n * config.max_sequence_length
    replica_tokens = -(-mini_batch_tokens // config.data_parallel_size)
    shares_base = config.model.lora_rank > 0 and unshared_reason(config) is None
    memory = memory_gib(config, shares_base)
    return _table(
        {
            "model": config.model.path,
            "algorithm": _algorithm(config),
            "ranks": f"{config.world_size}{' that train' if config.overlaps else ''}; "
            + _engines(config),
            **_critic_rows(config),
            "precision": describe_precision(
                ("trainer", config.sharding.dtype),
                ("engine", config.rollout.dtype),
                ("saved weights", trainer.save_dtype),
            ),
            "mesh": _mesh(config),
            "training": f"{len(train)} prompts{dropped}, {per_epoch} steps per epoch, "
            f"{trainer.steps(per_epoch)} in all",
            "validation": f"{len(val)} prompts" if val is not None else "none",
            "per step": f"{data.train_batch_size} prompts, {responses} responses, "
            f"{updates} optimizer step{'s' if updates > 1 else ''}",
            "lengths": f"prompt up to {data.max_prompt_length}, response up to "
            f"{data.max_response_length} tokens",
            "micro-batch": f"up to {max_tokens} tokens{shared}, at most "
            f"{-(-replica_tokens // max_tokens)} per optimizer step",
            "shared prefix": no_sharing_reason(config) or "a prompt is computed once for its group",
            "exact": inexact_reason(config) or "engine and trainer compute the same log-probs",
            "memory": ", ".join(f"{name} {size:.2f}" for name, size in memory.items())
            + " GiB per rank, estimated"
            + ("; engine weights and cache on engine ranks" if splits else ""),
            "written to": trainer.default_local_dir,
        }
    )


def sft_plan(config: SFTConfig, train: SFTDataset, val: SFTDataset | None) -> Table:
    """Describe an SFT run."""
    data, trainer = config.data, config.trainer
    per_epoch = len(train) // data.train_batch_size
    dropped = f", {train.dropped} overlong ones dropped" if train.dropped else ""
    tokens, trained = map(sum, zip(*((len(s.ids), s.num_loss_tokens) for s in train), strict=True))
    micro_batch = (
        f"{data.micro_batch_size_per_gpu} conversations"
        if data.micro_batch_size_per_gpu
        else f"up to {data.max_token_len_per_gpu} tokens"
    )
    return _table(
        {
            "model": config.model.path,
            "ranks": f"{config.world_size}, {config.data_parallel_size} data parallel",
            "precision": describe_precision(
                ("trainer", config.sharding.dtype), ("saved weights", trainer.save_dtype)
            ),
            "training": f"{len(train)} conversations{dropped}, {tokens} tokens, "
            f"{trained} of them trained on",
            "validation": f"{len(val)} conversations" if val is not None else "none",
            "steps": f"{per_epoch} per epoch, {trainer.steps(per_epoch)} in all, "
            f"{data.train_batch_size} conversations each",
            "micro-batch": f"{micro_batch} per rank",
            "shared prefix": no_sharing_reason(config) or "common prefixes are computed once",
            "written to": trainer.default_local_dir,
        }
    )


def start_of(config: RLConfig | SFTConfig, num_samples: int) -> str:
    """Describe where the run starts: anew, after the step of a checkpoint, or not at all."""
    trainer = config.trainer
    plan = resume_plan(trainer.default_local_dir, trainer.resume_mode, trainer.resume_from_path)
    steps = trainer.steps(num_samples // config.data.train_batch_size)
    done = f"; all {steps} steps are done" if plan.step >= steps else ""
    return f"{plan}{done}"


def _table(rows: dict[str, str]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", value)
    return table


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
    shards, sp_size = num_shards(config), config.sequence_parallel_size
    copies = f"{config.world_size // shards} x " if shards < config.world_size else ""
    sequences = f", sequences over {sp_size} neighbours" if sp_size > 1 else ""
    return f"weights sharded over {copies}{shards}{sequences}"


def _critic_rows(config: RLConfig) -> dict[str, str]:
    """Describe a critic on ranks of its own, with its weights, gradients and moments."""
    if not config.num_critic_ranks:
        return {}
    shards = num_shards(config, config.num_critic_ranks)
    size = 16.0 * num_parameters(config, config.critic.model.path or "") / shards / GIB
    return {
        "critic": f"{config.num_critic_ranks} ranks of its own, weights sharded over {shards}, "
        f"{size:.2f} GiB per rank without activations"
    }


def resolve_dtypes(config: _Config) -> _Config:
    """Return the configuration with a type in place of every `auto`.

    Engine and saved weights follow the compute type, `fsdp_config.dtype`. Collective inside a
    process group: all ranks get float32 unless bfloat16 is fast on every rank.
    """
    fast = torch.tensor(int(_fast_bfloat16()))
    if dist.is_initialized():
        dist.all_reduce(fast, op=dist.ReduceOp.MIN)
    compute = config.sharding.dtype
    chosen = ("bfloat16" if fast else "float32") if compute == "auto" else compute
    for key, kind in keys_of(type(config)):
        if kind == Dtype and reduce(getattr, key.split("."), config) == "auto":
            config = _with_value(config, key, chosen)
    return config


def describe_precision(*dtypes: tuple[str, str]) -> str:
    """Describe which part computes in which type, and why; dtypes: pairs (part, type)."""
    text = ", ".join(f"{part} {dtype}" for part, dtype in dtypes)
    if torch.cuda.is_available():
        return text
    if _fast_bfloat16():
        return f"{text}; this CPU has fast bfloat16 products (AVX512-BF16)"
    text += "; this CPU has no fast bfloat16 products (AVX512-BF16 or AMX)"
    if any(dtype != "float32" for _, dtype in dtypes):
        text += ", expect it to be slow: dtype=auto takes float32 here"
    return text


def _fast_bfloat16() -> bool:
    return has_fast_products(torch.bfloat16, "cuda" if torch.cuda.is_available() else "cpu")


def _with_value(group: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return replace(
        group, **{name: _with_value(getattr(group, name), rest, value) if rest else value}
    )
