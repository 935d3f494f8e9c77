"""Build the models of a run under FSDP2, with their optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from hybridengine.model import (
    Optimizer,
    adapters_disabled,
    apply_lora,
    load_causal_lm,
    on_device,
    sharding_mesh,
    use_exact_operators,
)
from hybridengine.model.extensions import model_extensions
from hybridengine.run.config import JobConfig, OptimConfig, RateConfig, RLConfig, SFTConfig
from hybridengine.run.plugins import load_plugin
from hybridengine.run.session import Session
from hybridengine.sync.shards import dim1_parameters
from hybridengine.train.algorithms import uses_critic
from hybridengine.train.batch import DataParallel
from hybridengine.train.build import (
    attachment_conflicts,
    checkpoint_layout,
    load_preparer,
    num_shards,
)
from hybridengine.train.choices import Choices
from hybridengine.train.models import Actor
from hybridengine.train.performance import pair_cost
from hybridengine.train.rollout_source import RolloutSource


def load_model(
    config: JobConfig,
    session: Session,
    path: str = "",
    *,
    is_trained: bool = False,
    splits: Mapping[str, int] | None = None,
    shard_dim1: Callable[[str], bool] = lambda name: False,
    base_memory: Mapping[str, torch.Tensor] = MappingProxyType({}),
    **options: bool,
) -> Any:
    """Load one model of the run, sharded by `config.sharding`.

    path: of the weights; empty: model.path.
    is_trained: it is the policy, or the model of SFT: it gets adapters and the settings of routers.
    splits: of the policy, where it has the engine's operators, see `use_exact_operators`.
    base_memory, options: further options of `load_causal_lm`.
    """
    fsdp, model = config.sharding, config.model
    rank, alpha, modules = model.lora_rank, model.lora_alpha, model.target_modules
    is_policy = path in ("", model.path) and "value_head" not in options
    changes = list[Callable[[Any], object]]()
    if is_trained and rank:
        changes.append(
            partial(
                apply_lora,
                rank=rank,
                alpha=alpha,
                target_modules=modules,
                adapter_path=model.lora_adapter_path,
                target_parameters=model.target_parameters,
                share_expert_adapters=model.share_expert_adapters,
            )
        )
    if is_trained:
        changes += [x for extension in model_extensions() for x in extension.changes(config)]
    if splits is not None and is_policy:
        changes.append(partial(use_exact_operators, splits=splits))

    def adapt(unsharded: Any) -> None:
        for change in changes:
            change(unsharded)

    loaded = load_causal_lm(
        path or model.path,
        mesh=sharding_mesh(
            session.device.type, session.world_size, num_shards(config, session.world_size)
        ),
        shard_dim1=shard_dim1,
        param_dtype=getattr(torch, fsdp.dtype),
        reshard_after_forward=fsdp.reshard_after_forward,
        forward_prefetch=fsdp.forward_prefetch,
        min_num_params=fsdp.wrap_policy.min_num_params,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        use_fused_kernels=model.use_fused_kernels,
        compile=model.compile,
        trust_remote_code=model.trust_remote_code,
        deterministic=config.deterministic,
        expert_parallel_size=fsdp.expert_parallel_size if is_policy else 1,
        adapt=adapt if changes else None,
        base_memory=base_memory,
        max_model_len=config.max_model_len,
        config_overrides=model.config_overrides if path in ("", model.path) else {},
        **options,
    )
    if is_policy and (is_trained or not path):
        for extension in model_extensions():
            extension.attach(loaded, config, is_trained=is_trained)
    return loaded


def load_value_model(config: RLConfig, session: Session, path: str) -> Any:
    """Load a model with a value head, see `load_model`."""
    offload = config.actor.fsdp_config.param_offload
    return load_model(config, session, path, value_head=True, param_offload=offload)


def build_data_parallel(config: JobConfig, session: Session, choices: Choices) -> DataParallel:
    """Build the replicas, which share prefixes where that was chosen."""
    assert isinstance(config, RLConfig | SFTConfig)
    return DataParallel(
        session,
        config.sequence_parallel_size,
        shared_prefix=choices.prefix,
        pair_cost=pair_cost(choices.model, checkpoint_layout(config).parameters),
        part_readers={
            name: reader
            for extension in model_extensions()
            for name, reader in extension.part_readers(config).items()
        },
        preparer=None if attachment_conflicts(config) else load_preparer(config),
    )


def build_optimizer(
    config: JobConfig, model: Any, optim: OptimConfig, rate: RateConfig, steps: int
) -> Optimizer:
    """Build AdamW with the options of `optim`, the learning rate and warm-up of `rate`."""
    return Optimizer(
        model,
        lr=rate.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        schedule=optim.lr_scheduler_type,
        min_lr_ratio=optim.min_lr_ratio,
        warmup_steps=rate.warmup_steps(steps),
        total_steps=steps,
        param_dtype=getattr(torch, config.sharding.dtype),
        offload=config.sharding.optimizer_offload,
    )


def build_actor(
    config: RLConfig,
    choices: Choices,
    source: RolloutSource,
    dp: DataParallel,
    updates: int,
    steps: int,
) -> Actor:
    """Build the policy under FSDP2 over all ranks.

    source: its engine may have the weights that the policy is computed with.
    updates: optimizer steps in all `steps`.

    `dim1_parameters` are sharded in dim 1, so that a weight sync moves less; none where FSDP2's
    unsharded parameters will be the engine's (`SharedParameters`), as its extensions need dim 0.
    The reference is a copy of the policy, or under LoRA the policy without its adapters; a teacher
    is another model.
    """
    shapes, optim = checkpoint_layout(config).parameters, config.actor.optim
    sliced, columns = source.sliced_dims(shapes), set[str]()
    if source.shared.target is None:
        columns = dim1_parameters(shapes, sliced, num_shards(config))
    tp_size = config.rollout.tensor_model_parallel_size
    splits = {name: tp_size for name, dim in sliced.items() if dim == 1 and tp_size > 1}
    load = partial(
        load_model,
        config,
        dp.session,
        shard_dim1=columns.__contains__,
        splits=splits if choices.exact else None,
        param_offload=config.actor.fsdp_config.param_offload,
    )
    reference: Any = None
    if config.uses_reference and not config.model.lora_rank:
        reference = partial(on_device, load().requires_grad_(False))
    model = load(is_trained=True, base_memory=source.shared.base)
    if config.uses_reference and config.model.lora_rank:
        reference = partial(adapters_disabled, model)
    optimizer = build_optimizer(config, model, optim, optim, updates)
    if config.distills:
        loss = load_plugin("losses", "distill", "algorithm.distill.teacher_path")
        student: Actor = loss.build_actor(config, model, optimizer, dp)
        return student
    return Actor(config, model, reference, optimizer, dp, steps)


def saved_states(config: JobConfig) -> list[str]:
    """Return the names of the states that a checkpoint of this run must hold to be resumed."""
    names = ["actor.optimizer"]
    if isinstance(config, RLConfig):
        names += ["kl"] if config.algorithm.use_kl_in_reward else []
        names += ["kl_loss"] if config.schedules_kl_loss else []
        names += ["critic.optimizer"] if uses_critic(config) else []
    return names
