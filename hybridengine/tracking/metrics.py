"""Metrics of every step to the console, a jsonl file and tensorboard, under verl's names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["MetricsLogger"]

# What the console line shows of a step: (metric, label, format).
_CONSOLE = (
    ("critic/score/mean", "reward", "{:.3f}"),
    ("response_length/mean", "length", "{:.1f}"),
    ("actor/entropy", "entropy", "{:.3f}"),
    ("actor/pg_loss", "loss", "{:+.4f}"),
    ("actor/grad_norm", "grad", "{:.2f}"),
    ("training/rollout_probs_diff_mean", "Δp", "{:.4f}"),
    ("timing_s/step", "time", "{:.1f} s"),
)


class MetricsLogger:
    """Sends metrics to each sink of `trainer.logger`; one rank owns it.

    Files are `<dir>/metrics.jsonl` (one object per `log`, non-finite numbers as null) and
    `<dir>/tensorboard/`. `history` keeps everything logged, for the learning curves.
    """

    def __init__(
        self,
        dir: str | Path,
        loggers: Sequence[str],
        *,
        total_steps: int,
        console: Console | None = None,
    ) -> None:
        self.history: list[dict[str, float]] = []
        self._total_steps = total_steps
        self._console = (console or Console()) if "console" in loggers else None
        Path(dir).mkdir(parents=True, exist_ok=True)
        self._jsonl = (Path(dir) / "metrics.jsonl").open("w") if "jsonl" in loggers else None
        self._tensorboard: Any = None
        if "tensorboard" in loggers:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(Path(dir) / "tensorboard"))

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
        if self._console is not None:
            self._console.print(self._line(step, values), soft_wrap=True)

    def _line(self, step: int, values: Mapping[str, float]) -> Text:
        parts = [f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"]
        parts += [f"{label} {form.format(values[n])}" for n, label, form in _CONSOLE if n in values]
        validation = [(n, v) for n, v in values.items() if n.startswith("val/")]
        parts += [f"{name} {value:.3f}" for name, value in validation]
        return Text("  ".join(parts), style="bold green" if validation else "")

    def close(self) -> None:
        if self._jsonl is not None:
            self._jsonl.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
