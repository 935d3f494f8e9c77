"""What a run shows and leaves behind; only rank 0 writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridengine.config import JobConfig, config_to_yaml
from hybridengine.runtime import Session
from hybridengine.storage import atomic_file
from hybridengine.tracking import (
    MetricsLogger,
    Progress,
    plot_learning_curves,
    write_summary,
)

__all__ = ["Reporter"]

_FILES = ("summary.json", "curves.png", "metrics.jsonl", "rollouts", "final")


class Reporter(AbstractContextManager["Reporter"]):
    """Console, metric files and summary of one run; the other ranks' are silent.

    Attributes:
        last: the newest value of every metric.
    """

    def __init__(self, config: JobConfig, session: Session, steps: int, first_step: int) -> None:
        trainer, self.is_main = config.trainer, session.is_main
        self.dir, self.last = Path(trainer.default_local_dir), dict[str, float]()
        self._session, self._console = session, Console(quiet=not session.is_main)
        self.logger = MetricsLogger(
            self.dir,
            trainer.logger if session.is_main else (),
            total_steps=steps,
            console=self._console,
            first_step=first_step,
            project=trainer.project_name,
            experiment=trainer.experiment_name,
            config=asdict(config),  # type: ignore[call-overload]
        )
        self._progress = Progress(steps - first_step, console=self._console)
        self._title = f"{trainer.project_name}: {trainer.experiment_name}"
        if session.is_main:
            with atomic_file(self.dir / "config.yaml") as temporary:
                temporary.write_text(config_to_yaml(config))

    def __enter__(self) -> Reporter:
        self._progress.__enter__()
        self._session.on_phase = lambda phase: self._progress.enter(phase, self._session.step)
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)
        self.logger.close()

    def say(self, what: Table | str) -> None:
        markup = isinstance(what, Table)
        self._console.print(what, highlight=False, markup=markup, soft_wrap=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A part of what there is to say of `step`."""
        self.last |= metrics
        self.logger.log(step, metrics)
        if "timing_s/step" in metrics:
            self._progress.finish_step(int(metrics["perf/total_num_tokens"]))

    def draw(self) -> None:
        """curves.png of what was logged so far."""
        if self.is_main:
            plot_learning_curves(self.logger.history, self.dir / "curves.png", title=self._title)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """summary.json and the last words on the screen."""
        if self.is_main:
            write_summary(self.dir / "summary.json", summary)
        there = ",".join(name for name in _FILES if (self.dir / name).exists())
        resumed = summary["resumed_after_step"]
        again = f" (resumed after step {resumed})" if resumed else ""
        took = f"{summary['steps']} steps in {summary['seconds']} s{again}"
        self.say(f"{took}; see {self.dir}{os.sep}{{{there}}}")
