"""Build what a run consists of from its configuration: data, engine, models, weight sync."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hybridengine.engine.interface import EngineOptions, RolloutEngine
from hybridengine.model import (
    LoadOptions,
    Optimizer,
    adapter_shards,
    adapters_disabled,
    apply_lora,
    frozen_parameters,
    load_causal_lm,
    on_device,
    parameter_shards,
    sharding_mesh,
    use_exact_operators,
)
from hybridengine.model.attachments import AttachmentPreparer, Conflict
from hybridengine.model.extensions import model_extensions
from hybridengine.model.parameters import layout_of
from hybridengine.model.validation import config_of
from hybridengine.run import import_file, load_plugin
from hybridengine.run.config import (
    ConfigError,
    JobConfig,
    OptimConfig,
    RateConfig,
    RLConfig,
    SFTConfig,
)
from hybridengine.run.config.common import TrainedModelConfig
from hybridengine.run.errors import UserError, located, unreadable_part
from hybridengine.run.session import Session
from hybridengine.sync.resharder import Resharder
from hybridengine.sync.shards import dim1_parameters
from hybridengine.sync.trainers import DeltaMode
from hybridengine.train.batch import DataParallel
from hybridengine.train.choices import Choices
from hybridengine.train.data import PromptDataset, PromptLoader, SFTDataset
from hybridengine.train.data.template import set_trained_template
from hybridengine.train.models import Actor, Critic
from hybridengine.train.performance import pair_cost
from hybridengine.train.rewards.manager import RewardManager, build_reward_manager


class RunData(NamedTuple):
    """What a run trains and validates on, and how responses are generated in turns and scored.

    val: None without data.
    loader: of the training prompts.
    agents: of `build_agents`.
    """

    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    val: PromptDataset | None
    reward: RewardManager
    loader: PromptLoader
    agents: Any


def load_tokenizer(config: JobConfig, path: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the folder or name `path`, by default the trained model's.

    That one has the chat template that is trained with, so that it is saved with the model.

    Raises ModelError if there is none, or none that transformers can read, and DataError for a
    chat template that cannot be read.
    """
    trust, folder = config.model.trust_remote_code, path or config.model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    except Exception as error:  # missing, cut and unknown files raise anything
        files = "tokenizer.json and tokenizer_config.json"
        raise unreadable_part("tokenizer", folder, files, error) from error
    if path is None:
        set_trained_template(tokenizer, config.data, load_preparer(config))
    return tokenizer


def load_preparer(config: JobConfig, path: str | None = None) -> AttachmentPreparer | None:
    """Load what prepares images for a model, None where it takes none.

    path: of the model; None: of the trained one.

    Data, engine and trainer of a process share it, and so the images that it has prepared. Raises
    ModelError for a model whose image processor cannot be read.
    """
    model = config.model
    options = json.dumps(dict(config.data.mm_processor_kwargs), sort_keys=True, default=str)
    return _load_preparer(model.at(path), options)


@cache
def _load_preparer(model: TrainedModelConfig, options: str) -> AttachmentPreparer | None:
    config, path, trust = config_of(model), str(model.path), model.trust_remote_code
    loaded = (
        extension.load_preparer(config, path, json.loads(options), trust)
        for extension in model_extensions()
    )
    return next((preparer for preparer in loaded if preparer is not None), None)


def attachment_conflicts(config: JobConfig) -> list[Conflict]:
    """Return the settings of a job that attachments are not supported with."""
    return [x for extension in model_extensions() for x in extension.conflicts(config)]


def load_dataset(
    config: JobConfig, tokenizer: PreTrainedTokenizerBase, files: Sequence[str]
) -> Any:
    """Load the prompts or, for SFT, the conversations of `files`.

    Raises DataError for any fault of a file, a row or the template.
    """
    if isinstance(config, SFTConfig):
        stops = find_stop_token_ids(config.model.path, tokenizer)
        return SFTDataset(files, tokenizer, config.data, load_preparer(config), stops)
    assert isinstance(config, RLConfig)
    tools = tool_schemas(config)
    return PromptDataset(files, tokenizer, config.data, tools, load_preparer(config))


def load_data(config: RLConfig) -> RunData:
    """Load what the responses of a run are made from.

    `model.external_lib`, which may register the reward manager, is imported before.
    """
    tokenizer, data = load_tokenizer(config), config.data
    train = load_dataset(config, tokenizer, data.train_files)
    val = load_dataset(config, tokenizer, data.val_files) if data.val_files else None
    reward = build_reward_manager(config.reward, data.max_response_length, tokenizer)
    loader = PromptLoader(train, data.train_batch_size, seed=config.seed, shuffle=data.shuffle)
    agents = build_agents(config, tokenizer)
    return RunData(tokenizer, train, val, reward, loader, agents)


def multi_turn(config: RLConfig) -> Any:
    """Return the entry point for responses of several turns, None where they are single turns.

    It has `tool_schemas(config)`, `build_agents(config, tokenizer)` and `with_turns(sample)`, the
    sample of a trajectory without turns as reward functions see it.
    """
    if not config.rollout.multi_turn.enable:
        return None
    return load_plugin("rollouts", "multi_turn", "rollout.multi_turn.enable")


def tool_schemas(config: RLConfig) -> list[dict[str, Any]]:
    """Return the tools that the chat template shows to the model."""
    turns = multi_turn(config)
    return [] if turns is None else turns.tool_schemas(config)


def build_agents(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Build what runs trajectories of several turns, None where responses are single turns.

    Raises ConfigError for tools, a format or an agent loop that do not exist.
    """
    turns = multi_turn(config)
    return None if turns is None else turns.build_agents(config, tokenizer)


def import_external(config: RLConfig) -> None:
    """Import `model.external_lib` for what it registers; once per process."""
    if config.model.external_lib:
        _import_external(config.model.external_lib)


@cache
def _import_external(name: str) -> None:
    file = Path(name).expanduser()
    if file.suffix == ".py":
        if not file.is_file():
            raise ConfigError(f"model.external_lib {located(name)} does not exist; check the path")
        import_file(file.resolve())
        return
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"model.external_lib {name!r} cannot be imported: {error}") from error


def build_engine(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase, name: str, *, exact: bool = False
) -> RolloutEngine:
    """Build the rollout engine on this rank, without weights.

    name: "vllm" or "hf" (`Choices.engine`), in the entry-point group `engines`.
    exact: with the trained model's operators (`Choices.exact`).
    """
    options = EngineOptions(
        model=config.model,
        rollout=replace(
            config.rollout,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
        ),
        checkpoint=layout_of(config.model),
        stop_token_ids=find_stop_token_ids(config.model.path, tokenizer),
        tokenizer=tokenizer,
        seed=config.seed,
        adapter_rank=config.model.lora_rank if config.reshard.lora == "adapters" else 0,
        exact=exact,
        record_routes=config.actor.router_replay == "rollout",
        record_likely=config.algorithm.score_centering.num_likely,
        preparer=load_preparer(config),
    )
    engine, given = load_plugin("engines", name, "rollout.name"), config.rollout.engine_kwargs.vllm
    try:
        built: RolloutEngine = engine(options)
        return built
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError) or not given:
            raise
        raise ConfigError(
            f"rollout.engine_kwargs.vllm is {dict(given)}, and vLLM does not start with it: "
            f"{' '.join(str(error).split())}"
        ) from error


def find_stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the EOS tokens of the tokenizer and of the generation config."""
    try:
        eos: Any = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model folder need not have one
        eos = None
    tokens = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    return sorted(token for token in tokens if token is not None)


def load_model(
    config: JobConfig,
    session: Session,
    path: str | None = None,
    *,
    is_trained: bool = False,
    value_head: bool = False,
    changes: Sequence[Callable[[Any], object]] = (),
    shard_dim1: Callable[[str], bool] = lambda name: False,
    base_memory: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Any:
    """Load one model of the run, sharded by `config.sharding`.

    path: of the weights; None: model.path.
    is_trained: it is the policy, or the model of SFT: it gets adapters and the settings of routers.
    changes: of the module, before it is sharded, after those by adapters and extensions.
    value_head, shard_dim1, base_memory: of `LoadOptions`.
    """
    model, sharding = config.model.at(path), config.sharding
    is_policy = model.path == config.model.path and not value_head
    if is_trained:
        changes = [*(x for each in model_extensions() for x in each.changes(config)), *changes]
    if is_trained and model.lora_rank:
        add_adapters = partial(
            apply_lora,
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            target_modules=model.target_modules,
            adapter_path=model.lora_adapter_path,
            target_parameters=model.target_parameters,
            share_expert_adapters=model.share_expert_adapters,
        )
        changes = [add_adapters, *changes]

    def adapt(unsharded: Any) -> None:
        for change in changes:
            change(unsharded)

    options = LoadOptions(
        model,
        sharding if is_policy else replace(sharding, expert_parallel_size=1),
        shard_dim1,
        adapt if changes else None,
        value_head,
        config.deterministic,
        base_memory,
        config.max_model_len,
    )
    num_shards = config.num_shards(session.world_size)
    mesh = sharding_mesh(session.device.type, session.world_size, num_shards)
    loaded = load_causal_lm(options, mesh)
    if is_policy and (is_trained or not path):
        for extension in model_extensions():
            extension.attach(loaded, config, is_trained=is_trained)
    return loaded


def build_data_parallel(config: JobConfig, session: Session, choices: Choices) -> DataParallel:
    """Build the replicas, which share prefixes where that was chosen."""
    return DataParallel(
        session,
        config.sequence_parallel_size,
        shared_prefix=choices.prefix,
        pair_cost=pair_cost(choices.model, layout_of(config.model).parameters),
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
    """Build an optimizer with the options of `optim`, the learning rate and warm-up of `rate`."""
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
        name=optim.name,
        options=optim.override_optimizer_config,
    )


def build_actor(
    config: RLConfig,
    choices: Choices,
    source: Any,
    dp: DataParallel,
    updates: int,
    steps: int,
) -> Actor:
    """Build the policy under FSDP2 over all ranks.

    source: the `RolloutSource`; its engine may have the weights that the policy is computed with.
    updates: optimizer steps in all `steps`.

    `dim1_parameters` are sharded in dim 1, so that a weight sync moves less; none where FSDP2's
    unsharded parameters will be the engine's (`SharedParameters`), as its extensions need dim 0.
    The reference is a copy of the policy, or under LoRA the policy without its adapters; a teacher
    is another model.
    """
    shapes, optim = layout_of(config.model).parameters, config.actor.optim
    sliced, columns = source.sliced_dims(shapes), set[str]()
    if source.shared.target is None:
        columns = dim1_parameters(shapes, sliced, config.num_shards())
    splits = {name: source.tp_size for name, dim in sliced.items() if dim == 1}
    dtype = getattr(torch, config.sharding.dtype) if config.reshard.lora == "merged" else None
    exactly = partial(use_exact_operators, splits=splits, merged_in=dtype)
    changes = [exactly] if choices.exact else []
    load = partial(load_model, config, dp.session, changes=changes, shard_dim1=columns.__contains__)
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


def build_critic(config: RLConfig, dp: DataParallel, steps: int) -> Critic:
    """Build the value model with an FSDP2 group of its own over the ranks of `dp`."""
    path = config.critic.model.path or config.model.path
    model = load_model(config, dp.session, path, value_head=True)
    optimizer = build_optimizer(config, model, config.actor.optim, config.critic.optim, steps)
    return Critic(config, model, optimizer, dp)


def build_resharder(
    config: RLConfig,
    actor: Actor,
    engine: RolloutEngine,
    delta: DeltaMode,
    shared: Collection[str] = (),
) -> Resharder:
    """Build the weight sync from the policy's shards into the engine.

    shared: parameters that are the engine's own tensors.
    """
    mib = config.reshard.bucket_mib

    def parameters() -> dict[str, torch.Tensor]:
        shards = parameter_shards(actor.model)
        return {name: shard for name, shard in shards.items() if name not in shared}

    return Resharder(
        parameters,
        engine,
        bucket_bytes=None if mib is None else mib << 20,
        adapters=partial(adapter_shards, actor.model),
        frozen=partial(frozen_parameters, actor.model),
        merge=config.reshard.lora == "merged",
        delta=delta,
    )
