"""Metrics of every step to the console, a jsonl file, tensorboard and wandb, by verl's names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from hybridengine.config import ConfigError
from hybridengine.storage import atomic_file

__all__ = ["MetricsLogger", "check_loggers"]

# What the console line shows of a step: (metric, label, format).
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
    if "wandb" in loggers and find_spec("wandb") is None:
        raise ConfigError(
            "trainer.logger names wandb, which is not installed; pip install wandb, or leave it out"
        )


class MetricsLogger(AbstractContextManager["MetricsLogger"]):
    """Sends metrics to each sink of `trainer.logger`; one rank owns it.

    Files are `<dir>/metrics.jsonl` (one object per `log`, non-finite numbers as null) and
    `<dir>/tensorboard/`. `history` keeps everything logged, for the learning curves.

    first_step: after how many steps a resumed run goes on; what was logged later is forgotten.
    project, experiment, config: what wandb files the run under.
    """

    def __init__(
        self,
        dir: str | Path,
        loggers: Sequence[str],
        *,
        total_steps: int,
        console: Console | None = None,
        first_step: int = 0,
        project: str = "hybridengine",
        experiment: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        check_loggers(loggers)
        self.history: list[dict[str, float]] = []
        self._total_steps = total_steps
        self._console = (console or Console()) if "console" in loggers else None
        Path(dir).mkdir(parents=True, exist_ok=True)
        self._jsonl = self._open_jsonl(Path(dir), first_step) if "jsonl" in loggers else None
        self._tensorboard: Any = None
        if "tensorboard" in loggers:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(Path(dir) / "tensorboard"), purge_step=first_step + 1 if first_step else None
            )
        self._wandb: Any = None
        if "wandb" in loggers:
            import wandb

            self._wandb = wandb.init(
                project=project, name=experiment, dir=str(dir), config=dict(config or {})
            )

    def _open_jsonl(self, dir: Path, first_step: int) -> TextIO:
        file = dir / "metrics.jsonl"
        if first_step and file.exists():
            lines = (line for line in file.read_text().splitlines() if line.endswith("}"))
            rows = [row for row in map(json.loads, lines) if row["step"] <= first_step]
            with atomic_file(file) as temporary:
                temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
            self.history = [{k: v for k, v in row.items() if v is not None} for row in rows]
        return file.open("a" if first_step else "w")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`; a step may be logged in parts, such as its validation."""
        values = {name: float(value) for name, value in metrics.items()}
        self.history.append({"step": step, **values})
        if self._jsonl is not None:
            finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
            self._jsonl.write(json.dumps({"step": step, **finite}) + "\n")
            self._jsonl.flush()
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)
        line = self._line(step, values)
        if self._console is not None and line is not None:
            self._console.print(line, soft_wrap=True)

    def _line(self, step: int, values: Mapping[str, float]) -> Text | None:
        parts = [f"{label} {form.format(values[n])}" for n, label, form in _CONSOLE if n in values]
        skipped = sum(v for n, v in values.items() if n.endswith("/skipped_updates"))
        parts += [f"skipped updates {skipped:.0f}"] if skipped else []
        validation = [(n, v) for n, v in values.items() if n.startswith("val/")]
        validation += _by_source(values)
        parts += [f"{name} {value:.3f}" for name, value in validation]
        if not parts:  # a part of a step that nobody watches, such as the time of its save
            return None
        head = f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"
        return Text("  ".join([head, *parts]), style="bold green" if validation else "")

    def close(self) -> None:
        if self._jsonl is not None:
            self._jsonl.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __exit__(self, *error: object) -> None:
        self.close()


def _by_source(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Validation metrics that say more than val/…: of several data sources, or best and maj."""
    core = [(name, v) for name, v in values.items() if name.startswith("val-core/")]
    several = sum("/mean@" in name for name, _ in core) > 1  # one of each source
    return [(n.removeprefix("val-core/"), v) for n, v in core if several or "/mean@" not in n]
