"""Settings of a run that a script starts: the arguments of `hybridengine.Trainer`, checked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridengine.run.config import (
    JOBS,
    ConfigError,
    JobConfig,
    RLConfig,
    SFTConfig,
    load_job,
    parse_overrides,
)
from hybridengine.train.start import check_launch

Config = str | Path | Mapping[str, Any] | RLConfig | SFTConfig

_INITIAL_MODEL = "initial_model"  # folder in the run's, of a model that was given loaded


def reward_functions(reward: Any) -> list[Callable[..., Any]]:
    """Return a function, several, or None as a list; ConfigError for what cannot be called."""
    functions = [] if reward is None else reward if isinstance(reward, list | tuple) else [reward]
    for function in functions:
        if not callable(function):
            raise ConfigError(
                f"reward is {function!r}, expected a function or a list of functions; a Python "
                "file or URL is given as overrides={'reward.custom_reward_function.path': …}"
            )
    return list(functions)


def path_of(model: Any) -> str | None:
    """Return the path of a model; "" for a loaded one."""
    if model is None or isinstance(model, str | Path):
        return None if model is None else str(model)
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"model is {type(model).__name__}, expected a path or a transformers model"
        )
    return ""


def load_settings(
    config: Config | None,
    overrides: Sequence[str] | Mapping[str, Any],
    task: str | None,
    model: str | None,
    rewards: Sequence[str],
) -> JobConfig:
    """Load the configuration with what the arguments of `Trainer` set."""
    if isinstance(config, RLConfig | SFTConfig):
        own = config.kind
        if task not in (None, own, *(["ppo"] if own == "grpo" else [])):
            raise ConfigError(f"task is {task!r}, but config is a {type(config).__name__}")
        config, task = asdict(config), own
    task = task or "grpo"
    if task not in JOBS:
        raise ConfigError(f"task is {task!r}, expected grpo, ppo or sft")
    if rewards and task == "sft":
        raise ConfigError("reward was given, but SFT has none; leave it out, or change task")
    if not isinstance(overrides, Mapping | list | tuple):
        raise ConfigError(f"overrides is {overrides!r}, expected a mapping or a list of key=value")
    tree = overrides if isinstance(overrides, Mapping) else parse_overrides(overrides)
    settings = dict(tree)
    if rewards:
        settings["reward.custom_reward_function.path"] = [*rewards]
    if model is not None:
        settings["model.path"] = model or _INITIAL_MODEL
    loaded = load_job(task, config, settings)
    if model != "":
        return loaded
    folder = Path(loaded.trainer.default_local_dir) / _INITIAL_MODEL
    return replace(loaded, model=replace(loaded.model, path=str(folder)))


def check_ranks(config: JobConfig) -> None:
    """Check the number of ranks against the processes that were started, else this one alone."""
    if isinstance(config, RLConfig) and config.overlaps:
        raise ConfigError(
            f"trainer.mode is {config.trainer.mode}"
            f"{' and rollout.servers are set' if config.rollout.servers else ''}, but every "
            "process of a script trains; start `hybridengine grpo`, or set trainer.mode=sync "
            "without servers"
        )
    if isinstance(config, RLConfig) and config.num_critic_ranks:
        raise ConfigError(
            f"critic.n_gpus_per_node is {config.critic.n_gpus_per_node}, but every process of a "
            "script trains the policy; start `hybridengine ppo`, or set critic.n_gpus_per_node=0"
        )
    if "RANK" in os.environ or dist.is_initialized():
        return check_launch(config)
    if config.world_size > 1:
        raise ConfigError(
            f"trainer.n_gpus_per_node * trainer.nnodes is {config.world_size}, but this process is "
            "one rank; set trainer.n_gpus_per_node=1, or start the script with torchrun "
            f"--nproc-per-node {config.trainer.n_gpus_per_node}"
        )


def save_initial_model(model: Any, tokenizer: Any, folder: str) -> None:
    """Write a loaded model, and its tokenizer, from which the run starts."""
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
