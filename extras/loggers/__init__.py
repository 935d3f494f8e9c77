"""Loggers of metrics besides files and the console: TensorBoard, Weights & Biases, MLflow.

A logger is a function of the run's folder, the step after which a resumed run continues and the
names of the run. It yields what writes the metrics of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridengine.run.config import JobConfig

__all__ = ["find_faults", "mlflow", "tensorboard", "wandb"]

Writer = Callable[[int, Mapping[str, float]], object]


def find_faults(config: JobConfig) -> Iterator[str]:
    """Yield a sentence for each logger whose package is missing."""
    for name in ("wandb", "mlflow"):
        if name in config.trainer.logger and find_spec(name) is None:
            yield (
                f"trainer.logger names {name}, which is not installed; pip install {name}, or "
                "leave it out"
            )


@contextmanager
def tensorboard(dir: Path, first_step: int, **run: Any) -> Iterator[Writer]:
    """Write to `<dir>/tensorboard/`."""
    from torch.utils.tensorboard import SummaryWriter

    purge_step = first_step + 1 if first_step else None
    with SummaryWriter(str(dir / "tensorboard"), purge_step=purge_step) as board:

        def write(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                board.add_scalar(name, value, step)

        yield write


@contextmanager
def wandb(dir: Path, first_step: int, **run: Any) -> Iterator[Writer]:
    """run: project, name and config."""
    import wandb

    wandb_run = wandb.init(dir=str(dir), **run)
    try:
        yield lambda step, values: wandb_run.log(values, step=step)
    finally:
        wandb_run.finish()


@contextmanager
def mlflow(dir: Path, first_step: int, **run: Any) -> Iterator[Writer]:
    """run: project, name and config."""
    import mlflow

    mlflow.set_experiment(run["project"])
    with mlflow.start_run(run_name=run["name"]):
        mlflow.log_dict(run["config"], "config.json")

        def write(step: int, values: Mapping[str, float]) -> None:
            # It refuses an @; verl writes these names.
            mlflow.log_metrics({n.replace("@", "_at_"): v for n, v in values.items()}, step=step)

        yield write
