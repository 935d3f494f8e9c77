"""Start a job: on all ranks of this machine, as one rank of torchrun, or from a script.

`python -m hybridengine.train.start KIND CONFIG` is one rank of `launch`. `load_settings` reads the
arguments of `hybridengine.Trainer`.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hybridengine.run.config import (
    JOBS,
    ConfigError,
    JobConfig,
    RLConfig,
    SFTConfig,
    config_to_yaml,
    load_job,
    parse_overrides,
)
from hybridengine.run.launch import launch_ranks, run_lock
from hybridengine.run.session import clear_status
from hybridengine.run.storage import atomic_file
from hybridengine.train.checkpoint.folders import find_checkpoints
from hybridengine.train.modes import mode_of

if TYPE_CHECKING:  # the launcher, which needs only an address, does not load a trainer
    from hybridengine.train.base import BaseTrainer

Config = str | Path | Mapping[str, Any] | RLConfig | SFTConfig

_INITIAL_MODEL = "initial_model"  # folder in the run's, of a model that was given loaded


def launch(config: JobConfig, module: str = "hybridengine.train.start") -> int:
    """Run all ranks of this machine and return the exit code of the run.

    module: what a rank runs, with the arguments KIND CONFIG.

    Raises ConfigError if another run is using the folder.
    """
    dir = Path(config.trainer.default_local_dir)
    address = mode_of(config).prepare_network()
    with run_lock(dir):
        clear_status(dir)
        config_file = dir / ".status" / "config.yaml"  # overrides applied
        with atomic_file(config_file) as temporary:
            temporary.write_text(config_to_yaml(config))
        arguments = ("-m", module, config.kind, str(config_file))
        resuming = partial(_how_to_resume, dir)
        return launch_ranks(arguments, dir, config.ranks_per_node, resuming, address)


def start_rank(config: JobConfig) -> int:
    """Train as the rank that torchrun's environment names and return its exit code.

    Rank 0 holds the lock on the run's folder. Raises ConfigError if another run is using it.
    """
    is_main = os.environ["RANK"] == "0"
    with run_lock(config.trainer.default_local_dir) if is_main else nullcontext():
        return trainer_of(config).run(config)


def _how_to_resume(dir: Path) -> str:
    """What the same command will do after a stop without a checkpoint."""
    saved = find_checkpoints(dir)
    if not saved:
        return "no checkpoint was saved; the same command starts anew"
    return f"the same command resumes after step {saved[-1].step} (trainer.resume_mode=auto)"


def trainer_of(config: JobConfig) -> type[BaseTrainer]:
    """Return the class that runs `config`, with the messages of its libraries silenced."""
    from hybridengine.train.rl import RLTrainer
    from hybridengine.train.sft import SFTTrainer

    silence_libraries()
    return SFTTrainer if isinstance(config, SFTConfig) else RLTrainer


def silence_libraries() -> None:
    """Turn off progress bars of transformers, and warnings that vLLM gives of itself."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


def config_of_rank() -> JobConfig:
    """Load the configuration that `launch` has given to this process."""
    _, kind, file = sys.argv
    config: JobConfig = load_job(kind, file)
    return config


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


def check_launch(config: JobConfig) -> None:
    """Check the number of ranks that torchrun started, and that several nodes use torchrun."""
    started, ranks = os.environ.get("WORLD_SIZE"), config.ranks_per_node * config.trainer.nnodes
    if started is not None and int(started) != ranks:
        keys = list(rank_keys(config))
        if isinstance(config, RLConfig) and config.rollout.servers:
            keys.append("1, for rollout.servers")
        per_node = f"({' + '.join(keys)})" if len(keys) > 1 else keys[0]
        raise ConfigError(
            f"torchrun started {started} ranks but {per_node} * trainer.nnodes is {ranks}; make "
            "them equal"
        )
    if started is None and config.trainer.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes is {config.trainer.nnodes}; start this command under torchrun "
            "--nnodes on every node, so that the ranks can find each other"
        )


def rank_keys(config: JobConfig) -> dict[str, int]:
    """Return the keys that set the ranks with a device on a machine, each with its number."""
    keys = {"trainer.n_gpus_per_node": config.trainer.n_gpus_per_node}
    if isinstance(config, RLConfig):
        if config.overlaps and not config.rollout.servers:
            keys["rollout.n_gpus_per_node"] = config.rollout.n_gpus_per_node
        if config.critic.n_gpus_per_node:
            keys["critic.n_gpus_per_node"] = config.critic.n_gpus_per_node
    return keys


if __name__ == "__main__":
    config = config_of_rank()
    sys.exit(trainer_of(config).run(config))  # the launcher holds the lock
