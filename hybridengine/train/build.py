"""Build what a run consists of from its configuration: data, engine, weight sync."""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hybridengine.engine.interface import EngineOptions, RolloutEngine
from hybridengine.model import adapter_shards, frozen_parameters, parameter_shards
from hybridengine.model.attachments import AttachmentPreparer, Conflict
from hybridengine.model.extensions import model_extensions
from hybridengine.model.parameters import checkpoint_layout_from_config
from hybridengine.model.validation import check_model
from hybridengine.run.config import ConfigError, JobConfig, RLConfig
from hybridengine.run.errors import UserError, located, unreadable_part
from hybridengine.run.plugins import load_plugin
from hybridengine.sync.layout import CheckpointLayout
from hybridengine.sync.resharder import Resharder
from hybridengine.sync.trainers import DeltaMode
from hybridengine.train.algorithms import check_estimator, uses_critic
from hybridengine.train.data import PromptDataset
from hybridengine.train.data.template import set_trained_template
from hybridengine.train.models import Actor
from hybridengine.train.rewards.function import import_file
from hybridengine.train.rewards.manager import RewardManager, build_reward_manager


class RunData(NamedTuple):
    """What a run trains and validates on, and how responses are scored. val: None without data."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    val: PromptDataset | None
    reward: RewardManager


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
    return _load_preparer(path or model.path, model.trust_remote_code, options)


@cache
def _load_preparer(path: str, trust_remote_code: bool, options: str) -> AttachmentPreparer | None:
    model = check_model(path, trust_remote_code)
    arguments = model, path, json.loads(options), trust_remote_code
    loaded = (extension.load_preparer(*arguments) for extension in model_extensions())
    return next((preparer for preparer in loaded if preparer is not None), None)


def attachment_conflicts(config: JobConfig) -> list[Conflict]:
    """Return the settings of a job that attachments are not supported with."""
    return [x for extension in model_extensions() for x in extension.conflicts(config)]


def load_data(config: RLConfig) -> RunData:
    """Load tokenizer, training prompts, validation prompts (or None) and reward.

    Imports `model.external_lib` first: it may register the estimator or the reward manager.
    """
    import_external(config)
    check_algorithm(config)
    tokenizer, data, tools = load_tokenizer(config), config.data, tool_schemas(config)
    dataset = partial(
        PromptDataset,
        tokenizer=tokenizer,
        data=data,
        tools=tools,
        preparer=load_preparer(config),
    )
    train, val = dataset(data.train_files), dataset(data.val_files) if data.val_files else None
    build_agents(config, tokenizer)  # its errors, before a model is loaded
    reward = build_reward_manager(config.reward, data.max_response_length, tokenizer)
    return RunData(tokenizer, train, val, reward)


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


def check_algorithm(config: RLConfig) -> None:
    """Raise ConfigError for an unknown estimator, and for ranks of a critic that it has not."""
    estimator = config.algorithm.adv_estimator
    try:
        check_estimator(estimator)
    except ValueError as error:
        raise ConfigError(f"algorithm.adv_estimator: {error}") from None
    if config.num_critic_ranks and not uses_critic(config):
        raise ConfigError(
            f"critic.n_gpus_per_node is {config.critic.n_gpus_per_node}, but "
            f"algorithm.adv_estimator {estimator!r} needs no critic; set it to 0, or take gae"
        )


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

    name: "vllm" or "hf" (`Choices.engine`).
    exact: with the trained model's operators (`Choices.exact`).
    """
    options = EngineOptions(
        model=config.model,
        rollout=replace(
            config.rollout,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
        ),
        checkpoint=checkpoint_layout(config),
        stop_token_ids=find_stop_token_ids(config.model.path, tokenizer),
        tokenizer=tokenizer,
        seed=config.seed,
        adapter_rank=config.model.lora_rank if config.reshard.lora == "adapters" else 0,
        exact=exact,
        record_routes=config.actor.router_replay == "rollout",
        preparer=load_preparer(config),
    )
    if name == "hf":
        from hybridengine.engine.hf import HfEngine

        return HfEngine(options)
    from hybridengine.engine.vllm.engine import VllmEngine

    given = config.rollout.engine_kwargs.vllm
    try:
        return VllmEngine(options)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError) or not given:
            raise
        raise ConfigError(
            f"rollout.engine_kwargs.vllm is {dict(given)}, and vLLM does not start with it: "
            f"{' '.join(str(error).split())}"
        ) from error


def checkpoint_layout(config: JobConfig, path: str = "") -> CheckpointLayout:
    """Return the layout of the checkpoint at `path`, by default model.path, from its config."""
    trust, overrides = config.model.trust_remote_code, {} if path else config.model.config_overrides
    model = check_model(path or config.model.path, trust, overrides)
    return checkpoint_layout_from_config(model, trust)


def num_shards(config: JobConfig, ranks: int | None = None) -> int:
    """Return how many of `ranks` ranks, by default the policy's, hold one copy of a model."""
    ranks, size = ranks or config.world_size, config.sharding.fsdp_size
    return ranks if size == -1 else min(size, ranks)


def find_stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the EOS tokens of the tokenizer and of the generation config."""
    try:
        eos: Any = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model folder need not have one
        eos = None
    tokens = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    return sorted(token for token in tokens if token is not None)


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
