"""Check the configuration against machine, model files and data, before any rank starts.

Configuration checks have two homes: `config.validation` checks keys against each other, this module
checks them against everything else. It decides what is checked; the packages below
provide the checks of their own files (`check_model`, `check_weights`, `check_resume`, …).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hybridengine.engine.interface import RolloutEngine
from hybridengine.engine.vllm.environment import CPU_HEAD_SIZES
from hybridengine.model import check_lora, check_sequence_parallel, is_sequence_classifier
from hybridengine.model.extensions import model_extensions
from hybridengine.model.packing_check import check_packing
from hybridengine.model.parameters import checkpoint_layout_from_config
from hybridengine.model.rotary import check_rotary
from hybridengine.model.validation import check_weights, config_of, head_size, longest_sequence
from hybridengine.run import load_plugin
from hybridengine.run.config import ConfigError, JobConfig, RLConfig, SFTConfig
from hybridengine.run.config.common import TrainedModelConfig
from hybridengine.run.errors import Faults, print_note
from hybridengine.run.storage import check_disk_space
from hybridengine.run.tracking import logger_module
from hybridengine.train.algorithms import NEEDS, check_estimator, uses_critic
from hybridengine.train.build import (
    attachment_conflicts,
    build_agents,
    import_external,
    load_dataset,
    load_tokenizer,
    multi_turn,
)
from hybridengine.train.checkpoint import check_resume, checkpoint_to_resume
from hybridengine.train.choices import Choices, Machine, decide, engine_name, resolve_dtypes
from hybridengine.train.data import PromptLoader, check_conversations, check_prompts
from hybridengine.train.performance import GIB
from hybridengine.train.rewards.manager import (
    build_reward_manager,
    check_reward,
    check_reward_files,
)
from hybridengine.train.start import rank_keys

_MASTER, _MOMENTS = 4, 8  # bytes of a weight and of its state in AdamW, float32


class Checked(NamedTuple):
    """What the checks of a job have read and decided.

    config: with a type in place of every `auto`.
    train, val: the datasets; val: None without data.
    choices: of this rank.
    """

    config: RLConfig | SFTConfig
    train: Any
    val: Any
    choices: Choices


def check_job(config: JobConfig, faults: Faults | None = None) -> Checked:
    """Check devices, model, disk, data and reward; load no weights.

    faults: the faults that are already known; None: none.

    Raises ConfigError, ModelError, DataError or RewardError for one fault, and a ConfigError with a
    line for each of several.
    """
    faults, machine = Faults() if faults is None else faults, Machine.here()
    config = resolve_dtypes(config, machine)
    assert isinstance(config, RLConfig | SFTConfig)
    model = _check_run(config, faults)
    if isinstance(config, RLConfig):
        is_registered = _check_models(config, faults)
        choices = _check_engine(config, model, machine, faults)
    else:
        choices = None if model is None else faults.attempt(decide, config, model, machine)
    tokenizer = None if model is None else faults.attempt(load_tokenizer, config)
    train, val = (
        _load_data(config, files, tokenizer, faults)
        for files in (config.data.train_files, config.data.val_files)
    )
    if model is not None:
        chosen = ("", False) if choices is None else (choices.engine, choices.exact)
        for extension in model_extensions():
            faults.attempt(extension.check, config, model, *chosen)
        faults.attempt(_check_images, config, (train, val))
        faults.attempt(_check_tokens, config, model, (train, val), faults)
        if train is not None:
            with faults:
                size, shuffle = config.data.train_batch_size, config.data.shuffle
                loader = PromptLoader(train, size, seed=config.seed, shuffle=shuffle)
                _check_resume(config, loader, model)
    if isinstance(config, RLConfig):
        with faults:
            if config.distills:
                key = "algorithm.distill.teacher_path"
                load_plugin("losses", "distill", key).check(config, tokenizer)
        if tokenizer is not None:
            faults.attempt(build_agents, config, tokenizer)
        if tokenizer is None or not is_registered:
            check_reward_files(config, faults)
        else:
            with faults:
                limit = config.data.max_response_length
                reward = build_reward_manager(config.reward, limit, tokenizer)
                check_reward(config, reward, (train, val), multi_turn(config))
    faults.report()
    assert train is not None and choices is not None
    return Checked(config, train, val, choices)


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
    for name in trainer.logger:
        if (module := logger_module(name)) is not None:
            faults.attempt(module.check, name)
    if config.model.compile or config.model.cuda_graphs:
        key = "model.compile or model.cuda_graphs"
        faults.attempt(load_plugin("compilers", "torch", key).check, config)
    model, num_bytes = faults.attempt(config_of, config.model) if path else None, 0
    if model is not None:
        faults.attempt(check_weights, path, model, trust)
        faults.attempt(check_packing, path, model, trust)
        faults.attempt(check_sequence_parallel, model, config.sequence_parallel_size)
        faults.attempt(check_rotary, model, config.max_model_len, trust)
        if (given := config.model).lora_rank:
            targets, adapter = given.target_modules, given.lora_adapter_path
            experts = given.target_parameters, given.share_expert_adapters
            faults.attempt(check_lora, model, given.lora_rank, targets, adapter, trust, *experts)
        with faults:
            shapes = checkpoint_layout_from_config(model, trust).tensors.values()
            num_bytes = sum(map(math.prod, shapes)) * getattr(torch, trainer.save_dtype).itemsize
    faults.attempt(check_disk_space, trainer.default_local_dir, num_bytes)
    return model


def _check_models(config: RLConfig, faults: Faults) -> bool:
    """Check estimator, critic and reward model; return whether external_lib has registered all."""
    is_registered = False
    with faults:
        import_external(config)
        check_algorithm(config)
        is_registered = True
    if path := config.critic.model.path:
        faults.attempt(_check_critic, config.model.at(path))
    with faults:
        if config.reward.reward_model.model_path:
            key = "reward.reward_model.model_path"
            load_plugin("rewards", "reward_model", key).check(config)
    return is_registered


def check_algorithm(config: RLConfig) -> None:
    """Check that the estimator is there, and what it needs; note a group of one response."""
    name = config.algorithm.adv_estimator
    try:
        check_estimator(name)
    except ValueError as error:
        raise ConfigError(f"algorithm.adv_estimator: {error}") from None
    if config.num_critic_ranks and not uses_critic(config):
        raise ConfigError(
            f"critic.n_gpus_per_node is {config.critic.n_gpus_per_node}, but "
            f"algorithm.adv_estimator {name!r} needs no critic; set it to 0, or take gae"
        )
    if config.overlaps and "reward_baselines" in NEEDS[name]:
        raise ConfigError(
            f"algorithm.adv_estimator is {name!r}, whose baseline is a greedy response of the "
            f"same weights, and trainer.mode is {config.trainer.mode}, in which these are older, "
            "or rollout.servers are set; set trainer.mode=sync without servers, or another "
            "estimator"
        )
    if config.rollout.n == 1 and "group_ids" in NEEDS[name] and not config.distills:
        print_note(
            f"rollout.n is 1, and algorithm.adv_estimator {name} compares the responses of a "
            "group: with one, its advantage is its score or 0; set rollout.n to 2 or more, or "
            "adv_estimator=reinforce_plus_plus"
        )


def _check_critic(model: TrainedModelConfig) -> None:
    path, trust, critic = model.path, model.trust_remote_code, config_of(model)
    check_weights(path, critic, trust, is_sequence_classifier(critic))
    check_packing(path, critic, trust)


def _load_data(
    config: RLConfig | SFTConfig,
    files: Sequence[str] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    faults: Faults,
) -> Any:
    """Return the dataset of `files`; None if there are none, or one of them is faulty.

    Each file is checked alone if they cannot be loaded, or there is no tokenizer.
    """
    if files and tokenizer is not None:
        with faults:
            return load_dataset(config, tokenizer, files)
    check: Any = check_conversations if isinstance(config, SFTConfig) else check_prompts
    for name in files or ():
        faults.attempt(check, [name], config.data)
    return None


def _check_images(config: JobConfig, parts: Sequence[Any]) -> None:
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


def _check_tokens(
    config: JobConfig, model: PretrainedConfig, parts: Sequence[Any], faults: Faults
) -> None:
    """Check that every token id has a row in the embedding, and the length of conversations."""
    is_sft, rows = isinstance(config, SFTConfig), model.get_text_config().vocab_size
    largest = longest = 0
    for ids in (x.ids if is_sft else x.prompt_ids for part in parts for x in part or ()):
        largest, longest = max(largest, max(ids, default=0)), max(longest, len(ids))
    if is_sft:
        what, key = "the longest conversation", "data.max_length"
        faults.attempt(check_length, model, longest, what, key)
    if largest >= rows:
        raise ConfigError(
            f"the tokenizer makes token id {largest}, but the model's vocabulary has {rows} "
            "tokens (vocab_size); use the tokenizer that belongs to the model"
        )


def _check_resume(
    config: RLConfig | SFTConfig, loader: PromptLoader, model: PretrainedConfig
) -> None:
    """Check that the checkpoint to resume from, if there is one, fits data and model."""
    states = ["actor.optimizer"]
    checkpoint = checkpoint_to_resume(config)
    if checkpoint is None:
        return
    if isinstance(config, RLConfig):
        states += ["kl"] if config.algorithm.use_kl_in_reward else []
        states += ["kl_loss"] if config.schedules_kl_loss else []
        states += ["critic.optimizer"] if uses_critic(config) else []
    layout = checkpoint_layout_from_config(model, config.model.trust_remote_code)
    check_resume(checkpoint, config, loader, layout.parameters, states)


def _check_engine(
    config: RLConfig, model: PretrainedConfig | None, machine: Machine, faults: Faults
) -> Choices | None:
    """Check the rollout engine against the machine and the model; return the run's choices."""
    engine = faults.attempt(engine_name, config, machine)
    if engine is not None:
        faults.attempt(check_engine, config, engine)
    if model is None:
        return None
    faults.attempt(_check_heads, config, model)
    lengths = "data.max_prompt_length or data.max_response_length"
    key = "rollout.max_model_len" if config.rollout.max_model_len else lengths
    faults.attempt(check_length, model, config.max_model_len, "the longest sequence", key)
    if engine is None:
        return None
    choices = faults.attempt(decide, config, model, machine)
    if engine == "vllm" and not config.rollout.servers:
        if memory := machine.gpu_bytes:
            shares = choices is not None and choices.shares
            faults.attempt(check_device_memory, config, model, memory, shares)
        else:
            faults.attempt(_check_head_size, model)
    return choices


def check_engine(config: RLConfig, name: str) -> None:
    """Check what needs no model: what the engine `name` can do and be given.

    Raises ConfigError with every fault.
    """
    if config.rollout.servers:
        return
    engine: type[RolloutEngine] = load_plugin("engines", name, "rollout.name")
    if faults := [*engine.find_faults(config)]:
        raise ConfigError(*faults)


def _check_heads(config: RLConfig, model: PretrainedConfig) -> None:
    """Check the tensor-parallel size against attention heads and key-value heads."""
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


def _check_head_size(model: PretrainedConfig) -> None:
    """Check that vLLM's attention on a CPU has heads of the model's size."""
    text = model.get_text_config()
    size = head_size(model)
    latent = getattr(text, "kv_lora_rank", None)  # attention over latent vectors has other sizes
    if latent is None and size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"rollout.name is vllm, whose attention on a CPU has no heads of size {size}, the "
            f"model's head_dim (it has {', '.join(map(str, CPU_HEAD_SIZES))}); set rollout.name=hf,"
            " or use a GPU"
        )


def check_device_memory(
    config: RLConfig, model: PretrainedConfig, memory: float, shares: bool
) -> None:
    """Check that the engine's share of a GPU holds its weights and leaves room for the trainer's.

    memory: bytes of the GPU.
    shares: the trainer computes with the engine's weights.
    """
    rollout = config.rollout
    shapes = checkpoint_layout_from_config(model, config.model.trust_remote_code).parameters
    numel = sum(map(math.prod, shapes.values()))
    weights = numel / rollout.tensor_model_parallel_size * getattr(torch, rollout.dtype).itemsize
    share = rollout.gpu_memory_utilization
    shown = f"rollout.gpu_memory_utilization is {share:g} of {memory / GIB:.1f} GiB"
    if weights > share * memory:
        raise ConfigError(
            f"{shown}, less than the engine's weights of {weights / GIB:.1f} GiB per rank; "
            "raise it, or rollout.tensor_model_parallel_size"
        )
    resident = 0.0 if config.overlaps else resident_bytes(config, numel, shares)
    if share * memory + resident > memory:
        raise ConfigError(
            f"{shown}, but the trainer keeps {resident / GIB:.1f} GiB per rank on the same GPU "
            "while the engine generates; lower it, set actor.fsdp_config.param_offload or "
            "actor.fsdp_config.optimizer_offload, or use more ranks"
        )


def resident_bytes(config: RLConfig, numel: int, shares: bool) -> float:
    """Return the least that the trainer's shards take on a rank's GPU while an engine generates.

    numel: weights of the policy; the critic is taken to be as large.
    shares: the trainer computes with the engine's weights.
    """
    fsdp, is_full = config.actor.fsdp_config, not config.model.lora_rank
    critics = uses_critic(config) and not config.num_critic_ranks
    frozen = config.uses_reference and is_full
    own = is_full or not shares  # no base in the engine's weights
    of_weight = 0 if fsdp.param_offload else _MASTER * (own + frozen + critics)
    of_weight += 0 if fsdp.optimizer_offload else _MOMENTS * (is_full + critics)
    return of_weight * numel / config.num_shards()


def check_length(model: PretrainedConfig, length: int, what: str, key: str) -> None:
    """Check a number of tokens, of `what` and limited by `key`, against the model's positions."""
    limit = longest_sequence(model)
    if limit is not None and length > limit:
        raise ConfigError(
            f"{what} has {length} tokens, but the model was made for {limit} "
            f"(max_position_embeddings); lower {key}"
        )
