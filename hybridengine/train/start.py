"""Start a job: on all ranks of this machine, or as one rank that torchrun has started.

`python -m hybridengine.train.start KIND CONFIG` is one rank of `launch`.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hybridengine.run.config import JobConfig, SFTConfig, config_to_yaml, load_job
from hybridengine.run.launch import launch_ranks
from hybridengine.run.status import clear_status, run_lock
from hybridengine.run.storage import atomic_file
from hybridengine.train.checkpoint.folders import find_checkpoints
from hybridengine.train.mode import mode_of

if TYPE_CHECKING:
    from hybridengine.train.base import BaseTrainer


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
