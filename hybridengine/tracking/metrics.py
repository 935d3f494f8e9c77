"""Log the metrics of every step, under verl's names, to console, files and services."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hybridengine.errors import ConfigError
from hybridengine.storage import atomic_file, writing

# Metrics on the console line of a step: (metric, label, format).
_CONSOLE = (
    ("critic/score/mean", "reward", "{:.3f}"),
    ("response_length/mean", "length", "{:.1f}"),
    ("actor/entropy", "entropy", "{:.3f}"),
    ("actor/pg_loss", "loss", "{:+.4f}"),
    ("actor/grad_norm", "grad", "{:.2f}"),
    ("train/loss", "loss", "{:.4f}"),
    ("train/grad_norm", "grad", "{:.2f}"),
    ("train/lr", "lr", "{:.2e}"),
    ("critic/vf_loss", "vf loss", "{:.4f}"),
    ("critic/vf_explained_var", "explained", "{:+.2f}"),
    ("critic/grad_norm", "vf grad", "{:.2f}"),
    ("training/rollout_probs_diff_mean", "Δp", "{:.4f}"),
    ("timing_s/step", "time", "{:.1f} s"),
)


def check_loggers(loggers: Sequence[str]) -> None:
    """Raise ConfigError for a logger whose package is missing."""
    for name in ("wandb", "mlflow"):
        if name in loggers and find_spec(name) is None:
            raise ConfigError(
                f"trainer.logger names {name}, which is not installed; pip install {name}, or "
                "leave it out"
            )


class MetricsLogger(ExitStack):
    """Sends metrics to each logger of `trainer.logger`; only rank 0 has loggers.

    Files are `<dir>/metrics.jsonl` (one object per `log`, non-finite numbers as null) and
    `<dir>/tensorboard/`.

    first_step: the step after which a resumed run continues; later entries are removed.
    run: of wandb and MLflow, the run's project, name and config.

    Attributes:
        history: everything logged, one row per `log`, for the learning curves.
    """

    def __init__(
        self,
        dir: Path,
        loggers: Sequence[str],
        console: Console,
        total_steps: int,
        first_step: int = 0,
        **run: Any,
    ) -> None:
        super().__init__()
        check_loggers(loggers)
        self.history: list[dict[str, float]] = []
        self._writers: list[Callable[[int, dict[str, float]], Any]] = []
        self._console, self._total_steps = console, total_steps
        dir.mkdir(parents=True, exist_ok=True)
        if "jsonl" in loggers:
            self._file = dir / "metrics.jsonl"
            self._jsonl = self.enter_context(self._open_jsonl(self._file, first_step))
            self._writers.append(self._write_row)
        if "tensorboard" in loggers:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = first_step + 1 if first_step else None
            writer = SummaryWriter(str(dir / "tensorboard"), purge_step=purge_step)
            self._board = self.enter_context(writer)
            self._writers.append(self._add_scalars)
        if "wandb" in loggers:
            import wandb

            wandb_run = wandb.init(dir=str(dir), **run)
            self.callback(wandb_run.finish)
            self._writers.append(lambda step, values: wandb_run.log(values, step=step))
        if "mlflow" in loggers:
            import mlflow

            mlflow.set_experiment(run["project"])
            self.enter_context(mlflow.start_run(run_name=run["name"]))
            mlflow.log_dict(run["config"], "config.json")
            self._writers.append(lambda step, values: mlflow.log_metrics(_plain(values), step=step))
        if "console" in loggers:
            self._writers.append(self._print)

    def _open_jsonl(self, file: Path, first_step: int) -> FileIO:
        if first_step and file.exists():
            rows = [r for r in map(_read_row, file.open("rb")) if r and r["step"] <= first_step]
            with atomic_file(file) as temporary:
                temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
            self.history = [{k: v for k, v in row.items() if v is not None} for row in rows]
        return file.open("ab" if first_step else "wb", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of `step`; a step may be logged in parts, such as its validation."""
        values = {name: float(value) for name, value in metrics.items()}
        self.history.append({"step": step, **values})
        for write in self._writers:
            write(step, values)

    def _write_row(self, step: int, values: Mapping[str, float]) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        row = (json.dumps({"step": step, **finite}) + "\n").encode()
        with writing(self._file):
            while row:  # a disk that becomes full takes the first part of a row
                row = row[self._jsonl.write(row) :]

    def _add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def _print(self, step: int, values: Mapping[str, float]) -> None:
        parts = [f"{label} {form.format(values[n])}" for n, label, form in _CONSOLE if n in values]
        skipped = sum(v for n, v in values.items() if n.endswith("/skipped_updates"))
        parts += [f"skipped updates {skipped:.0f}"] if skipped else []
        validation = [(n, v) for n, v in values.items() if n.startswith("val/")]
        validation += _by_source(values)
        parts += [f"{name} {value:.3f}" for name, value in validation]
        if parts:  # none: such as the time of a save
            head = f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"
            line = Text("  ".join([head, *parts]), style="bold green" if validation else "")
            self._console.print(line, soft_wrap=True)


def _read_row(line: bytes) -> dict[str, Any] | None:
    """Return a row, None for a line that a crash has left incomplete or damaged."""
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) else None
    except (ValueError, TypeError, KeyError):
        return None


def _plain(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under names without the @ that MLflow refuses, as verl writes them."""
    return {name.replace("@", "_at_"): value for name, value in values.items()}


def _by_source(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return validation metrics that val/… does not have: per data source, or best@N and maj@N."""
    core = [(name, v) for name, v in values.items() if name.startswith("val-core/")]
    several = sum("/mean@" in name for name, _ in core) > 1  # one per source
    return [(n.removeprefix("val-core/"), v) for n, v in core if several or "/mean@" not in n]
