"""Output of a run: console, metrics, curves, summary; only rank 0 writes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridengine.run.config import JobConfig, config_to_yaml
from hybridengine.run.session import Session
from hybridengine.run.storage import atomic_file
from hybridengine.run.tracking.console import LINE_WIDTH, Progress
from hybridengine.run.tracking.curves import plot_learning_curves
from hybridengine.run.tracking.files import write_summary
from hybridengine.run.tracking.metrics import MetricsLogger

_FILES = ("summary.json", "curves.png", "metrics.jsonl", "rollouts", "final")
_FIRST_DRAWING_S = 10.0  # the curves are drawn, then as often as takes this share of the time
_DRAWING_SHARE = 0.01


class Reporter(ExitStack):
    """Console, metric files and summary of one run; silent on other ranks than 0.

    Attributes:
        last: the newest value of every metric.
    """

    def __init__(self, config: JobConfig, session: Session, steps: int, first_step: int) -> None:
        super().__init__()
        trainer, self.is_main = config.trainer, session.is_main
        self.dir, self.last = Path(trainer.default_local_dir), dict[str, float]()
        width = None if sys.stdout.isatty() else LINE_WIDTH
        self._console = Console(quiet=not session.is_main, width=width)
        loggers = trainer.logger if session.is_main else ()
        settings: dict[str, Any] = asdict(config)  # type: ignore[call-overload]
        run = {"project": trainer.project_name, "name": trainer.experiment_name, "config": settings}
        logger = MetricsLogger(self.dir, loggers, self._console, steps, first_step, **run)
        self.logger = self.enter_context(logger)
        self._title = f"{trainer.project_name}: {trainer.experiment_name}"
        self._next_drawing = time.monotonic() + _FIRST_DRAWING_S
        if session.is_main:
            with atomic_file(self.dir / "config.yaml") as temporary:
                temporary.write_text(config_to_yaml(config))
        self._progress = self.enter_context(Progress(steps - first_step, console=self._console))
        session.on_phase = lambda phase: self._progress.enter(phase, session.step)

    def print(self, text: Table | str) -> None:
        markup = isinstance(text, Table)
        self._console.print(text, highlight=False, markup=markup, soft_wrap=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log some of the metrics of `step`."""
        self.last |= metrics
        self.logger.log(step, metrics)
        if "timing_s/step" in metrics:
            self._progress.finish_step()

    def draw(self) -> None:
        """Draw curves.png from the metrics logged so far."""
        if self.is_main:
            started = time.monotonic()
            plot_learning_curves(self.logger.history, self.dir / "curves.png", title=self._title)
            ended = time.monotonic()
            self._next_drawing = ended + (ended - started) / _DRAWING_SHARE

    def draw_if_due(self) -> None:
        """Draw the curves if the last time is long enough ago."""
        if time.monotonic() >= self._next_drawing:
            self.draw()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and print where the results are."""
        if self.is_main:
            write_summary(self.dir / "summary.json", summary)
        files = ",".join(name for name in _FILES if (self.dir / name).exists())
        step = summary["resumed_after_step"]
        resumed = f" (resumed after step {step})" if step else ""
        self.print(
            f"{summary['steps']} steps in {summary['seconds']} s{resumed}; "
            f"see {self.dir}{os.sep}{{{files}}}"
        )
