"""Loggers of metrics besides files and the console: TensorBoard, Weights & Biases, MLflow.

Each is a context manager of the run's folder, the step after which a resumed run continues, and the
run's project, name and config. It yields what writes the metrics of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridengine.run.errors import ConfigError

__all__ = ["check", "open_logger"]

Writer = Callable[[int, Mapping[str, float]], object]


def check(name: str) -> None:
    """Raise ConfigError if the package of the logger is missing."""
    if name != "tensorboard" and find_spec(name) is None:
        raise ConfigError(
            f"trainer.logger names {name}, which is not installed; pip install {name}, or "
            "leave it out"
        )


def open_logger(
    logger: str, dir: Path, first_step: int, /, **run: Any
) -> AbstractContextManager[Writer]:
    loggers = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
    return loggers[logger](dir, first_step, **run)


@contextmanager
def _tensorboard(dir: Path, first_step: int, **run: Any) -> Iterator[Writer]:
    """Write to `<dir>/tensorboard/`."""
    from torch.utils.tensorboard import SummaryWriter

    purge_step = first_step + 1 if first_step else None
    with SummaryWriter(str(dir / "tensorboard"), purge_step=purge_step) as board:

        def write(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                board.add_scalar(name, value, step)

        yield write


@contextmanager
def _wandb(dir: Path, first_step: int, **run: Any) -> Iterator[Writer]:
    import wandb

    wandb_run = wandb.init(dir=str(dir), **run)
    try:
        yield lambda step, values: wandb_run.log(values, step=step)
    finally:
        wandb_run.finish()


@contextmanager
def _mlflow(dir: Path, first_step: int, **run: Any) -> Iterator[Writer]:
    import mlflow

    mlflow.set_experiment(run["project"])
    with mlflow.start_run(run_name=run["name"]):
        mlflow.log_dict(run["config"], "config.json")

        def write(step: int, values: Mapping[str, float]) -> None:
            # It refuses an @; verl writes these names.
            mlflow.log_metrics({n.replace("@", "_at_"): v for n, v in values.items()}, step=step)

        yield write
