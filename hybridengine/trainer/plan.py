"""What a run is going to do, in numbers, before it does it."""

from __future__ import annotations

import math

import torch
from rich.table import Table

from hybridengine.checkpoint import resume_plan
from hybridengine.config import GRPOConfig, SFTConfig
from hybridengine.data import PromptDataset
from hybridengine.data.sft import SFTDataset
from hybridengine.model.checking import check_model
from hybridengine.reshard.record.checkpoint import checkpoint_layout
from hybridengine.trainer.algorithms import NEEDS
from hybridengine.trainer.precision import describe_precision
from hybridengine.trainer.setup import engine_name

__all__ = ["plan_table", "sft_plan", "start_of", "sync_volume"]

_GIB = 2.0**30


def plan_table(config: GRPOConfig, train: PromptDataset, val: PromptDataset | None) -> Table:
    data, trainer, tp_size = config.data, config.trainer, config.rollout.tensor_model_parallel_size
    per_epoch = len(train) // data.train_batch_size
    responses = data.train_batch_size * config.rollout.n
    updates = config.actor.ppo_epochs * (data.train_batch_size // config.ppo_mini_batch_size)
    dropped = f", {train.dropped} overlong ones dropped" if train.dropped else ""
    sharing = config.sequence_parallel_size
    budget = config.actor.ppo_max_token_len_per_gpu * sharing
    shared = f" shared by {sharing} ranks" if sharing > 1 else " on each rank"
    tokens = config.ppo_mini_batch_size * config.rollout.n * config.longest
    most = -(-tokens // config.data_parallel_size)
    rows = {
        "model": config.model.path,
        "algorithm": f"{config.algorithm.adv_estimator}, {config.actor.policy_loss.loss_mode}, "
        f"{config.actor.loss_agg_mode}",
        "ranks": f"{config.world_size}; engine: {config.world_size // tp_size} replicas, "
        f"tensor parallel over {tp_size}",
        "precision": describe_precision(
            ("trainer", config.sharding.dtype), ("engine", config.rollout.dtype)
        ),
        "mesh": _mesh(config),
        "training": f"{len(train)} prompts{dropped}, {per_epoch} steps per epoch, "
        f"{trainer.steps(per_epoch)} in all",
        "validation": f"{len(val)} prompts" if val is not None else "none",
        "per step": f"{data.train_batch_size} prompts, {responses} responses, "
        f"{updates} optimizer step{'s' if updates > 1 else ''}",
        "lengths": f"prompt up to {data.max_prompt_length}, response up to "
        f"{data.max_response_length} tokens",
        "micro-batch": f"up to {budget} tokens{shared}, at most {-(-most // budget)} per "
        "optimizer step",
        "memory": ", ".join(f"{name} {size:.2f}" for name, size in _memory_gib(config).items())
        + " GiB per rank, estimated",
        "written to": trainer.default_local_dir,
    }
    return _table(rows)


def sft_plan(config: SFTConfig, train: SFTDataset, val: SFTDataset | None) -> Table:
    data, trainer = config.data, config.trainer
    per_epoch = len(train) // data.train_batch_size
    tokens, learnt = map(sum, zip(*((len(s.ids), s.num_targets) for s in train), strict=True))
    micro = (
        f"{data.micro_batch_size_per_gpu} conversations"
        if data.micro_batch_size_per_gpu
        else f"up to {data.max_token_len_per_gpu} tokens"
    )
    rows = {
        "model": config.model.path,
        "ranks": f"{config.world_size}, {config.data_parallel_size} data parallel",
        "precision": describe_precision(("trainer", config.sharding.dtype)),
        "training": f"{len(train)} conversations, {tokens} tokens, {learnt} of them learnt",
        "validation": f"{len(val)} conversations" if val is not None else "none",
        "steps": f"{per_epoch} per epoch, {trainer.steps(per_epoch)} in all, "
        f"{data.train_batch_size} conversations each",
        "micro-batch": f"{micro} per rank",
        "written to": trainer.default_local_dir,
    }
    return _table(rows)


def start_of(config: GRPOConfig | SFTConfig, num_samples: int) -> str:
    """Where the run begins: anew, after the step of a checkpoint, or not at all."""
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


def sync_volume(config: GRPOConfig) -> str:
    """What a weight sync will move, planned from the configuration alone."""
    model = check_model(config.model.path, config.model.trust_remote_code)
    if engine_name(config) == "hf":
        shapes = checkpoint_layout(model, config.model.trust_remote_code).parameters
        whole = sum(map(math.prod, shapes.values())) * _itemsize(config.rollout.dtype)
        received = lower = whole * (1 - 1 / config.world_size)
    else:
        from hybridengine.reshard.advisor.advise import advise
        from hybridengine.rollout.vllm.record import record_engine_layouts

        shapes, layouts = record_engine_layouts(
            config.model.path,
            config.rollout.tensor_model_parallel_size,
            config.model.trust_remote_code,
        )
        nodes, fsdp_size = config.trainer.nnodes, _shards(config)
        advice = advise(shapes, layouts, config.world_size, nodes=nodes, fsdp_size=fsdp_size)
        best = advice.options[0]
        wider = _itemsize(config.rollout.dtype) / torch.bfloat16.itemsize  # what was planned for
        received, lower = best.received_bytes * wider, best.lower_bound_bytes * wider
    return (
        f"{received / 2**20:.1f} MiB received per rank and step (lower bound {lower / 2**20:.1f})"
    )


def _mesh(config: GRPOConfig) -> str:
    shards = _shards(config)
    sharing = config.sequence_parallel_size
    copies = f"{config.world_size // shards} x " if shards < config.world_size else ""
    sequences = f", sequences over {sharing} neighbours" if sharing > 1 else ""
    return f"weights sharded over {copies}{shards}{sequences}"


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def _shards(config: GRPOConfig) -> int:
    size = config.sharding.fsdp_size
    return config.world_size if size == -1 else size


def _memory_gib(config: GRPOConfig) -> dict[str, float]:
    """By part, the largest per rank: float32 masters, gradients and two moments are 16 bytes.

    Activations after Korthikanti et al. 2022 (arXiv 2205.05198, section 4): 34 H bytes per token
    and layer in 16 bits, or 2 H where layers are recomputed.
    """
    trust = config.model.trust_remote_code
    model = check_model(config.model.path, trust)
    text = model.get_text_config()
    numel = sum(math.prod(shape) for shape in checkpoint_layout(model, trust).parameters.values())
    per_token = 1 if config.model.enable_gradient_checkpointing else 17  # elements
    per_token *= _itemsize(config.sharding.dtype)
    tokens = max(
        config.actor.ppo_max_token_len_per_gpu,
        -(-config.longest // config.sequence_parallel_size),
    )
    lora = config.model.lora_rank > 0  # frozen weights have neither gradients nor moments
    parts = {"policy": (4.0 if lora else 16.0) * numel / _shards(config)}
    if config.uses_reference and not lora:
        parts["reference"] = 4.0 * numel / _shards(config)
    if "values" in NEEDS.get(config.algorithm.adv_estimator, ()):
        parts["critic"] = 16.0 * numel / _shards(config)
    parts["activations"] = per_token * tokens * text.hidden_size * text.num_hidden_layers
    engine = _itemsize(config.rollout.dtype) * numel
    parts["engine weights"] = engine / config.rollout.tensor_model_parallel_size
    gib = {name: size / _GIB for name, size in parts.items()}
    if engine_name(config) == "vllm" and not torch.cuda.is_available():
        gib["cache"] = config.rollout.kv_cache_gib
    return gib
