"""Check the configuration against machine, model files and data, before any rank starts.

Configuration checks have two homes: `config.validation` checks keys against each other, this module
checks them against everything else. It decides what is checked; the packages below
provide the checks of their own files (`check_model`, `check_weights`, `check_resume`, …).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hybridengine.model import check_lora, check_sequence_parallel, is_sequence_classifier
from hybridengine.model.extensions import model_extensions
from hybridengine.model.loading import check_compiler
from hybridengine.model.packing_check import check_packing
from hybridengine.model.parameters import checkpoint_layout_from_config
from hybridengine.model.rotary import check_rotary
from hybridengine.model.validation import check_model, check_weights
from hybridengine.run.config import ConfigError, JobConfig, RLConfig, SFTConfig
from hybridengine.run.errors import Faults, print_note
from hybridengine.run.plugins import load_plugin
from hybridengine.run.storage import check_disk_space
from hybridengine.run.tracking import check_loggers
from hybridengine.train.algorithms import NEEDS
from hybridengine.train.build import (
    attachment_conflicts,
    build_agents,
    check_algorithm,
    find_stop_token_ids,
    import_external,
    load_preparer,
    load_tokenizer,
    multi_turn,
    tool_schemas,
)
from hybridengine.train.build_models import saved_states
from hybridengine.train.checkpoint import check_resume
from hybridengine.train.choices import Choices, decide, engine_name
from hybridengine.train.data import (
    PromptDataset,
    PromptLoader,
    SFTDataset,
    check_conversations,
    check_prompts,
)
from hybridengine.train.preflight_engine import (
    check_engine,
    check_heads,
    check_length,
    check_model_in_engine,
    check_sequence_length,
)
from hybridengine.train.rewards.manager import (
    build_reward_manager,
    check_reward,
    check_reward_files,
)
from hybridengine.train.start import rank_keys

__all__ = ["check_grpo", "check_sft"]

T = TypeVar("T")
DatasetT = TypeVar("DatasetT")


class Checked(NamedTuple, Generic[DatasetT]):
    """What the checks of a job have read: training data, validation data, choices of this rank."""

    train: DatasetT
    val: DatasetT | None
    choices: Choices


def check_grpo(config: RLConfig, faults: Faults | None = None) -> Checked[PromptDataset]:
    """Check devices, model, disk, data and reward; load no weights.

    faults: the faults that are already known; None: none.

    Raises ConfigError, ModelError, DataError or RewardError for one fault, and a ConfigError with a
    line for each of several.
    """
    faults = Faults() if faults is None else faults
    model = _check_run(config, faults)
    is_registered = False  # what external_lib registers, the estimator among it
    with faults:
        import_external(config)
        check_algorithm(config)
        _note_groups_of_one(config)
        is_registered = True
    engine, choices = faults.attempt(engine_name, config), None
    if engine is not None:
        faults.attempt(check_engine, config, engine)
    for check in (_check_critic, _check_reward_model, _check_baselines):
        faults.attempt(check, config)
    if model is not None:
        for fits in (check_heads, check_sequence_length):
            faults.attempt(fits, config, model)
    if model is not None and engine is not None:
        choices = faults.attempt(decide, config, model)
        shares = choices is not None and choices.shares
        faults.attempt(check_model_in_engine, config, model, engine, shares)
    tokenizer = _load_tokenizer(config, model, faults)
    faults.attempt(_check_teacher, config, tokenizer)
    tools = faults.attempt(tool_schemas, config)
    train, val = (
        _load_data(
            files,
            lambda names: PromptDataset(
                names, tokenizer, config.data, tools or (), load_preparer(config)
            ),
            lambda names: check_prompts(names, config.data),
            faults,
            is_readable=tokenizer is not None and tools is not None,
        )
        for files in (config.data.train_files, config.data.val_files)
    )
    if tokenizer is not None and tools is not None:
        faults.attempt(build_agents, config, tokenizer)
    if model is not None:
        faults.attempt(_check_images, config, (train, val))
        prompts = (sample.prompt_ids for part in (train, val) for sample in part or ())
        faults.attempt(_check_tokens, model, prompts)
    if model is not None and train is not None:
        faults.attempt(_check_resume, config, train, model)
    if tokenizer is None or not is_registered:
        check_reward_files(config, faults)
    else:
        with faults:
            limit = config.data.max_response_length
            reward = build_reward_manager(config.reward, limit, tokenizer)
            check_reward(config, reward, (train, val), multi_turn(config))
    faults.report()
    assert train is not None and choices is not None
    return Checked(train, val, choices)


def check_sft(config: SFTConfig, faults: Faults | None = None) -> Checked[SFTDataset]:
    """As `check_grpo`, for SFT."""
    faults = Faults() if faults is None else faults
    model = _check_run(config, faults)
    tokenizer = _load_tokenizer(config, model, faults)
    train, val = (
        _load_data(
            files,
            lambda names: SFTDataset(
                names,
                tokenizer,
                config.data,
                load_preparer(config),
                find_stop_token_ids(config.model.path, cast(Any, tokenizer)),
            ),
            lambda names: check_conversations(names, config.data),
            faults,
            is_readable=tokenizer is not None,
        )
        for files in (config.data.train_files, config.data.val_files)
    )
    if model is not None:
        faults.attempt(_check_images, config, (train, val))
        samples = [sample.ids for part in (train, val) for sample in part or ()]
        longest = max(map(len, samples), default=0)
        faults.attempt(_check_tokens, model, samples)
        what, key = "the longest conversation", "data.max_length"
        faults.attempt(check_length, model, longest, what, key)
    if model is not None and train is not None:
        faults.attempt(_check_resume, config, train, model)
    choices = None if model is None else faults.attempt(decide, config, model)
    faults.report()
    assert train is not None and choices is not None
    return Checked(train, val, choices)


def _check_run(config: RLConfig | SFTConfig, faults: Faults) -> PretrainedConfig | None:
    """Check what every kind of training needs; return the model's configuration.

    None where it cannot be read, which is one of `faults`.
    """
    trainer, path, trust = config.trainer, config.model.path, config.model.trust_remote_code
    ranks, devices = rank_keys(config), torch.cuda.device_count()
    with faults:
        if devices and sum(ranks.values()) > devices:
            keys = " and ".join(f"{key} is {n}" for key, n in ranks.items())
            raise ConfigError(f"{keys} but this machine has {devices} GPUs; lower it")
    faults.attempt(check_loggers, trainer.logger)
    if config.model.compile:
        faults.attempt(check_compiler)
    for key, value in (("model.path", path), ("data.train_files", config.data.train_files)):
        with faults:
            if not value:
                raise ConfigError(f"{key} is required and was not given; set it in the config")
    overrides, model = config.model.config_overrides, None
    if path:
        model = faults.attempt(check_model, path, trust, overrides)
    num_bytes = 0
    if model is not None:
        faults.attempt(check_weights, path, model, trust)
        faults.attempt(check_packing, path, model, trust)
        for extension in model_extensions():
            faults.attempt(extension.check, config, model)
        faults.attempt(check_sequence_parallel, model, config.sequence_parallel_size)
        faults.attempt(check_rotary, model, config.max_model_len, trust)
        faults.attempt(_check_adapters, config, model)
        with faults:
            shapes = checkpoint_layout_from_config(model, trust).tensors.values()
            # Not resolve_dtypes, a collective, for a type that the caller left auto.
            dtype = "float32" if trainer.save_dtype == "auto" else trainer.save_dtype
            num_bytes = sum(map(math.prod, shapes)) * getattr(torch, dtype).itemsize
    faults.attempt(check_disk_space, trainer.default_local_dir, num_bytes)
    return model


def _load_tokenizer(
    config: JobConfig, model: PretrainedConfig | None, faults: Faults
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model that can be read."""
    return None if model is None else faults.attempt(load_tokenizer, config)


def _load_data(
    files: Sequence[str] | None,
    load: Callable[[Sequence[str]], T],
    check: Callable[[Sequence[str]], None],
    faults: Faults,
    *,
    is_readable: bool,
) -> T | None:
    """Return the result of `load(files)`; None if there are no files or one of them is faulty.

    check: checks the files alone; it is called with each file if they cannot be loaded.
    is_readable: whether everything else that `load` needs is there.
    """
    if files and is_readable:
        with faults:
            return load(files)
    for name in files or ():
        faults.attempt(check, [name])
    return None


def _check_images(
    config: RLConfig | SFTConfig, parts: Sequence[PromptDataset | SFTDataset | None]
) -> None:
    """Check that a job whose data has images has no setting that excludes them.

    parts: training and validation data. Raises ConfigError with the first image.
    """
    if not (found := attachment_conflicts(config)):
        return
    samples = (sample for part in parts for sample in part or ())
    image = next((sample.images[0] for sample in samples if sample.images), None)
    if image is not None:
        raise ConfigError(
            f"{image.where}: the data has images, which {found[0].setting} does not support; "
            f"{found[0].remedy}"
        )


def _check_adapters(config: RLConfig | SFTConfig, model: PretrainedConfig) -> None:
    given = config.model
    if given.lora_rank:
        check_lora(
            model,
            given.lora_rank,
            given.target_modules,
            given.lora_adapter_path,
            given.trust_remote_code,
            given.target_parameters,
            given.share_expert_adapters,
        )


def _check_tokens(model: PretrainedConfig, sequences: Iterable[Sequence[int]]) -> None:
    """Check that every token id has a row in the embedding."""
    rows = model.get_text_config().vocab_size
    largest = max((max(ids) for ids in sequences if len(ids)), default=0)
    if largest >= rows:
        raise ConfigError(
            f"the tokenizer makes token id {largest}, but the model's vocabulary has {rows} "
            "tokens (vocab_size); use the tokenizer that belongs to the model"
        )


def _check_resume(
    config: RLConfig | SFTConfig, train: PromptDataset | SFTDataset, model: PretrainedConfig
) -> None:
    """Check that the checkpoint to resume from fits the data and the model."""
    data = config.data
    loader = PromptLoader(train, data.train_batch_size, seed=config.seed, shuffle=data.shuffle)
    layout = checkpoint_layout_from_config(model, config.model.trust_remote_code)
    check_resume(config, loader, layout.parameters, saved_states(config))


def _note_groups_of_one(config: RLConfig) -> None:
    """Print a note where the estimator compares responses that there are not."""
    estimator = config.algorithm.adv_estimator
    if config.rollout.n == 1 and "group_ids" in NEEDS[estimator] and not config.distills:
        print_note(
            f"rollout.n is 1, and algorithm.adv_estimator {estimator} compares the responses of a "
            "group: with one, its advantage is its score or 0; set rollout.n to 2 or more, or "
            "adv_estimator=reinforce_plus_plus"
        )


def _check_baselines(config: RLConfig) -> None:
    """Check that the estimator needs no responses of the weights that are trained now."""
    estimator = config.algorithm.adv_estimator
    if config.overlaps and "reward_baselines" in NEEDS.get(estimator, ()):
        raise ConfigError(
            f"algorithm.adv_estimator is {estimator!r}, whose baseline is a greedy response of the "
            f"same weights, and trainer.mode is {config.trainer.mode}, in which these are older, "
            "or rollout.servers are set; set trainer.mode=sync without servers, or another "
            "estimator"
        )


def _check_critic(config: RLConfig) -> None:
    path, trust = config.critic.model.path, config.model.trust_remote_code
    if path:
        critic = check_model(path, trust)
        check_weights(path, critic, trust, is_sequence_classifier(critic))
        check_packing(path, critic, trust)


def _check_reward_model(config: RLConfig) -> None:
    if config.reward.reward_model.model_path:
        key = "reward.reward_model.model_path"
        load_plugin("rewards", "reward_model", key).check(config)


def _check_teacher(config: RLConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Check the teacher's files; tokenizer: the student's, None where there is none."""
    if config.distills:
        load_plugin("losses", "distill", "algorithm.distill.teacher_path").check(config, tokenizer)
