"""Start a job: on all ranks of this machine, or as one rank that torchrun has started.

`python -m hybridengine.train.start KIND CONFIG` is one rank of `launch`. A `Mode` says what the
ranks do: everything on all of them, or what it assigns to each. Other modes register themselves in
the entry-point group `hybridengine.modes`, each under the value of `trainer.mode`, or under
`servers` or `critic_ranks`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hybridengine.run.config import JobConfig, RLConfig, SFTConfig, config_to_yaml, load_job
from hybridengine.run.launch import launch_ranks
from hybridengine.run.plugins import load_plugin
from hybridengine.run.session import Session, run_rank
from hybridengine.run.status import clear_status, run_lock
from hybridengine.run.storage import atomic_file
from hybridengine.train.checkpoint.folders import find_checkpoints

if TYPE_CHECKING:  # the launcher, which needs only an address, does not load a trainer
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.train.base import BaseTrainer
    from hybridengine.train.build import RunData
    from hybridengine.train.choices import Choices
    from hybridengine.train.critic import ExternalCritic
    from hybridengine.train.data import PromptLoader
    from hybridengine.train.rollout_source import RolloutSource


class Mode:
    """Every rank trains and generates. Other modes override these methods."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config

    def prepare_network(self) -> str:
        """Prepare the network of this process; return the address of the ranks' store.

        "" is every address of this machine.
        """
        return "127.0.0.1"

    def run(self, train: Callable[[Session], None]) -> int:
        """Run one rank and return its exit code, see `run_rank`. train: runs a trainer rank."""
        trainer = self.config.trainer
        return run_rank(train, trainer.default_local_dir, trainer.timeout_s)

    def rollouts(
        self,
        config: RLConfig,
        choices: Choices,
        session: Session,
        data: RunData,
        loader: PromptLoader,
        sampling: SamplingSpec,
    ) -> RolloutSource:
        """Return where a trainer rank gets its rollouts from. config: with resolved dtypes."""
        from hybridengine.train.rollout_source import ColocatedRollouts

        return ColocatedRollouts(config, choices, session, data, loader, sampling)

    def critic(self, config: RLConfig, session: Session, num_updates: int) -> ExternalCritic | None:
        """Return the critic that is on other ranks; None: the trainer ranks have it, if any.

        config: with resolved dtypes.
        num_updates: the critic's optimizer steps in the whole run.
        """
        return None


def mode_of(config: JobConfig) -> Mode:
    """Return the mode of a run; ConfigError if no installed package registers it."""
    if not isinstance(config, RLConfig):
        return Mode(config)
    name, key = config.trainer.mode, "trainer.mode"
    if name == "sync" and config.rollout.servers:
        name, key = "servers", "rollout.servers"
    elif name == "sync" and config.num_critic_ranks:
        name, key = "critic_ranks", "critic.n_gpus_per_node"
    if name == "sync":
        return Mode(config)
    mode: Mode = load_plugin("modes", name, key)(config)
    return mode


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


if __name__ == "__main__":
    config = config_of_rank()
    sys.exit(trainer_of(config).run(config))  # the launcher holds the lock
