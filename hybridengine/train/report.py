"""What a run tells and leaves: console, metrics, curves, skipped updates, final/."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hybridengine.model import Optimizer, SkippedUpdate, on_device
from hybridengine.run import plugins
from hybridengine.run.config import JobConfig, config_to_yaml
from hybridengine.run.errors import ModelError
from hybridengine.run.messages import broadcast_value
from hybridengine.run.session import Session
from hybridengine.run.storage import atomic_file
from hybridengine.run.tracking import (
    LINE_WIDTH,
    MetricsLogger,
    Progress,
    steps_of_summary,
    write_summary,
)
from hybridengine.train.checkpoint import SavedCheckpoint, changed_settings
from hybridengine.train.checkpoint.pretrained import save_adapter, save_pretrained

_FILES = ("summary.json", "curves.png", "metrics.jsonl", "rollouts", "final")
_FIRST_DRAWING_S = 10.0  # the curves are drawn, then as often as takes this share of the time
_DRAWING_SHARE = 0.01

MAX_FAILED_UPDATES = 10  # in a row; then the run fails

_REMEDY = "lower the learning rate, or check rewards and data"


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

    def draw(self, *, if_due: bool = False) -> None:
        """Let extras draw the metrics logged so far: the group `hybridengine.reports`.

        if_due: only if the last time is long enough ago.
        """
        if self.is_main and (not if_due or time.monotonic() >= self._next_drawing):
            started = time.monotonic()
            for entry in plugins("reports").values():
                entry.load()(self.logger.history, self.dir, self._title)
            ended = time.monotonic()
            self._next_drawing = ended + (ended - started) / _DRAWING_SHARE

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


def export_final(
    model: Any,
    tokenizer: Any,
    run_dir: Path,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    has_adapter: bool,
    saved: Path | None,
) -> None:
    """Write the model to `run_dir`/final, and its adapter to final_adapter. Collective.

    dtype: of the weights.
    saved: the last checkpoint, if there is one.

    Raises ModelError if the export fails; the message names the checkpoint.
    """
    final = run_dir / "final"
    try:
        with on_device(model):
            save_pretrained(model, tokenizer, final, dtype, group=group)
            if has_adapter:
                save_adapter(model, tokenizer, run_dir / "final_adapter", group)
    except ModelError as error:
        if saved is None:
            raise
        raise ModelError(
            f"{error}; nothing is lost: `hybridengine export {saved} --out {final}` exports the "
            "last checkpoint"
        ) from error


def was_finished(
    config: JobConfig, resumed: SavedCheckpoint | None, steps: int, is_main: bool
) -> bool:
    """Return, and print, whether an earlier run in the run's folder took the last step. Collective.

    resumed: the checkpoint of the earlier part, if there is one.
    steps: of the whole run.
    is_main: whether this rank prints.
    """
    if resumed is None:
        return False
    run_dir, first = Path(config.trainer.default_local_dir), resumed.step
    is_own = resumed.path.resolve().parent == run_dir.resolve()
    of_summary = steps_of_summary(run_dir / "summary.json")  # an earlier part may have ended
    complete = (run_dir / "final").is_dir() and of_summary == first
    finished = broadcast_value(is_own and complete and first >= steps, bool)
    if finished and is_main:
        print(
            f"nothing was trained: the run in {run_dir} finished its {first} steps "
            "before; raise trainer.total_training_steps (or total_epochs) to train longer, or "
            "start anew with trainer.resume_mode=disable or another trainer.default_local_dir"
        )
        for change in changed_settings(resumed, config):
            print(f"  changed since, without effect: {change}")
    return finished


def print_resumed(
    write: Callable[[str], None], resumed: SavedCheckpoint, config: JobConfig, is_main: bool
) -> None:
    """Print from where the run resumes, and the settings that have changed since."""
    write(f"resumed after step {resumed.step} from {resumed.path}")
    if is_main:
        for change in changed_settings(resumed, config):
            write(f"  changed since: {change}")


class UpdateLog:
    """The skipped updates of a run, by optimizer; the same on all ranks."""

    def __init__(self) -> None:
        self._first_skipped = dict[str, int]()  # the step since which all updates were skipped
        self._cause = dict[str, str]()  # of the newest one
        self._skipped: dict[str, list[SkippedUpdate]] = {}

    def take(self, step: int, optimizers: Mapping[str, Optimizer]) -> dict[str, float]:
        """Take the updates that were skipped in `step`; return their numbers as metrics."""
        self._skipped = {name: optimizer.pop_skipped() for name, optimizer in optimizers.items()}
        for name, skipped in self._skipped.items():
            if skipped:
                self._cause[name] = _cause(name, skipped[-1])
                if optimizers[name].skipped_in_a_row <= len(skipped):
                    self._first_skipped[name] = step
        return {f"{name}/skipped_updates": len(x) for name, x in self._skipped.items()}

    def report(
        self, step: int, optimizers: Mapping[str, Optimizer], print: Callable[[str], None]
    ) -> None:
        """Warn of the updates taken last; raise ModelError after too many failed ones in a row."""
        for name, skipped in self._skipped.items():
            for update in skipped:
                print(
                    f"warning: step {step}: {_cause(name, update)}; this update was skipped, and "
                    "the weights are unchanged"
                )
            if (in_a_row := optimizers[name].failed_in_a_row) >= MAX_FAILED_UPDATES:
                raise ModelError(
                    f"loss or gradient norm of {name} were not finite in {in_a_row} updates in a "
                    f"row, since step {self._first_skipped[name]}, all of which were skipped (in "
                    f"step {step} {self._cause[name]}); {_REMEDY}, and resume from the newest "
                    "checkpoint"
                )

    def failure(self, optimizers: Mapping[str, Optimizer]) -> str | None:
        """Return why a run that ends now has not trained to its last step; None if it has.

        It has where the last update or the one before it was made: a single one may be skipped at
        any time, such as by a loss scale that has just grown.
        """
        for name, optimizer in optimizers.items():
            count = optimizer.skipped_in_a_row
            if count > 1 or 0 < count == optimizer.num_updates:
                last = "the last update" if count == 1 else f"the last {count} updates"
                return (
                    f"{last} of {name}, since step {self._first_skipped[name]}, were all skipped "
                    f"({self._cause[name]}), and its weights are those before that step; {_REMEDY}"
                )
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"first_skipped": self._first_skipped, "cause": self._cause}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._first_skipped, self._cause = dict(state["first_skipped"]), dict(state["cause"])


def _cause(name: str, update: SkippedUpdate) -> str:
    """Describe what was not finite."""
    if math.isfinite(update.loss):
        return f"the gradient norm of {name} is {update.norm}"
    outputs = (
        f", as are {update.num_nonfinite} outputs of its model" if update.num_nonfinite else ""
    )
    return f"the loss of {name} is {update.loss}{outputs}"
