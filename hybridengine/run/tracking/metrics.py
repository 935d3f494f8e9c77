"""Log the metrics of every step, under verl's names, to console, files and services."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hybridengine.run.errors import ConfigError
from hybridengine.run.storage import atomic_file, writing
from hybridengine.run.tracking.console import LINE_WIDTH, StepLine


class RunClock:
    """The seconds of a run by part, such as `step`; every moment belongs to exactly one part.

    Attributes:
        part: the current one.
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self._seconds = defaultdict[str, float](float)
        self._since = time.perf_counter()

    def enter(self, part: str) -> str:
        """Begin a part; return the one that ends."""
        now = time.perf_counter()
        self._seconds[self.part] += now - self._since
        self._since, ended, self.part = now, self.part, part
        return ended

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """What runs inside belongs to `part`, and interrupts the part around it."""
        outer = self.enter(part)
        try:
            yield
        finally:
            self.enter(outer)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all parts up to now."""
        self.enter(self.part)
        return dict(self._seconds)

    def add(self, seconds: dict[str, float]) -> None:
        """Add those of an earlier part of the run."""
        for part, x in seconds.items():
            self._seconds[part] += x


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
    run: the project, name and config of the run in wandb and MLflow.

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
        self._console = console
        width = console.width if console.is_terminal else LINE_WIDTH
        self._line = StepLine(total_steps, min(width, LINE_WIDTH))
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
        if line := self._line.format(step, values):
            is_validation = any(name.startswith("val/") for name in values)
            style = "bold green" if is_validation else ""
            self._console.print(Text(line, style=style), soft_wrap=True)


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


def steps_of_summary(path: Path) -> int | None:
    """Return how many steps the run of a summary had taken; None if there is no such file."""
    try:
        steps = json.loads(path.read_bytes())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary` as JSON; non-finite numbers become null."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in summary.items()
    }
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(clean, indent=2, allow_nan=False) + "\n")
