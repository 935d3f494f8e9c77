"""What a run shows and keeps of its steps: metrics under verl's names, progress, a trace."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text
from torch.profiler import profile

from hybridengine.run import load_plugin
from hybridengine.run.storage import atomic_file, writing

LINE_WIDTH = 100  # columns of a line
_RATE_STEPS = 20  # the time left is estimated from as many steps
_NUM_PHASES, _SMALLEST_SHARE = 2, 0.05  # phases of a step that are printed

# (metric, label, format), the most important one first: what does not fit is left out.
_METRICS = (
    ("critic/score/mean", "reward", "{:.3f}"),
    ("train/loss", "loss", "{:.4f}"),
    ("response_length/mean", "len", "{:.0f}"),
    ("actor/entropy", "entropy", "{:.2f}"),
    ("actor/grad_norm", "grad", "{:.2f}"),
    ("train/grad_norm", "grad", "{:.2f}"),
    ("critic/vf_explained_var", "explained", "{:+.2f}"),
    ("critic/vf_loss", "vf loss", "{:.3f}"),
    ("train/lr", "lr", "{:.1e}"),
    ("training/rollout_probs_diff_mean", "Δp", "{:.4f}"),
    ("actor/pg_loss", "loss", "{:+.4f}"),
)
_PHASES = {
    "update_actor": "update",
    "update_weights": "sync",
    "update_critic": "critic",
    "write_rollouts": "write",
}


def logger_module(name: str) -> Any:
    """Return the module of an installed logger; None for those of this file."""
    own = name in ("console", "jsonl")
    return None if own else load_plugin("loggers", name, "trainer.logger")


class MetricsLogger(ExitStack):
    """Sends metrics to each logger of `trainer.logger`; only rank 0 has loggers.

    jsonl is `<dir>/metrics.jsonl`, one object per `log`, non-finite numbers as null.

    first_step: the step after which a resumed run continues; later entries are removed.
    run: the project, name and config of the run.

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
        self.history: list[dict[str, float]] = []
        self._writers: list[Callable[[int, dict[str, float]], object]] = []
        self._console = console
        width = console.width if console.is_terminal else LINE_WIDTH
        self._line = StepLine(total_steps, min(width, LINE_WIDTH))
        dir.mkdir(parents=True, exist_ok=True)
        if "jsonl" in loggers:
            self._writers.append(self._open_jsonl(dir / "metrics.jsonl", first_step))
        for name in loggers:
            if (module := logger_module(name)) is not None:
                opened = module.open_logger(name, dir, first_step, **run)
                self._writers.append(self.enter_context(opened))
        if "console" in loggers:
            self._writers.append(self._print)

    def _open_jsonl(self, file: Path, first_step: int) -> Callable[[int, dict[str, float]], None]:
        """Read what a resumed run keeps; return what writes a row."""
        if first_step and file.exists():
            rows = [r for r in map(_read_row, file.open("rb")) if r and r["step"] <= first_step]
            with atomic_file(file) as temporary:
                temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
            self.history = [{k: v for k, v in row.items() if v is not None} for row in rows]
        opened = self.enter_context(file.open("ab" if first_step else "wb", buffering=0))

        def write(step: int, values: Mapping[str, float]) -> None:
            row = (json.dumps({"step": step, **_finite(values)}) + "\n").encode()
            with writing(file):
                while row:  # a disk that becomes full takes the first part of a row
                    row = row[opened.write(row) :]

        return write

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of `step`; a step may be logged in parts, such as its validation."""
        values = {name: float(value) for name, value in metrics.items()}
        self.history.append({"step": step, **values})
        for write in self._writers:
            write(step, values)

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


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with null in place of numbers that JSON does not have."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }


def steps_of_summary(path: Path) -> int | None:
    """Return how many steps the run of a summary had taken; None if there is no such file."""
    try:
        steps = json.loads(path.read_bytes())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary` as JSON; non-finite numbers become null."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n")


class StepLine:
    """Formats the metrics of a step as one line of at most `LINE_WIDTH` columns.

    step  12/100  reward 0.250  len 84  9.5 s  gen 62% update 25%  5.1k tok/s  ETA 14m
    """

    def __init__(self, total_steps: int, width: int = LINE_WIDTH) -> None:
        self._total, self._width = total_steps, width
        self._ends = deque[float](maxlen=_RATE_STEPS + 1)

    def format(self, step: int, values: Mapping[str, float]) -> str:
        """Return the line; empty where no metric of it is given, such as for the time of a save."""
        skipped = sum(v for n, v in values.items() if n.endswith("/skipped_updates"))
        first = [f"skipped updates {skipped:.0f}"] if skipped else []
        metrics = [
            f"{label} {form.format(values[n])}" for n, label, form in _METRICS if n in values
        ]
        metrics += [f"{name} {value:.3f}" for name, value in _validation(values)]
        speed = list(self._speed(step, values)) if "timing_s/step" in values else []
        parts = [*first, *metrics, *speed]
        if not parts:
            return ""
        most_important = [*first, *metrics[:1], *speed, *metrics[1:]]
        head = f"step {step:>{len(str(self._total))}}/{self._total}"
        chosen = _fitting(most_important, self._width - len(head))
        return "  ".join([head, *(part for part in parts if part in chosen)])

    def _speed(self, step: int, values: Mapping[str, float]) -> Iterator[str]:
        """Yield the time of the step, its longest phases, tokens per second and the time left."""
        seconds = values["timing_s/step"]
        yield f"{seconds:.1f} s"
        names = {n: n.removeprefix("timing_s/") for n in values if n.startswith("timing_s/")}
        shares = {p: values[n] / seconds for n, p in names.items() if "/" not in p and p != "step"}
        longest = sorted(shares, key=lambda phase: -shares[phase])[:_NUM_PHASES]
        if large := [p for p in longest if shares[p] >= _SMALLEST_SHARE]:
            yield " ".join(f"{_PHASES.get(p, p)} {shares[p]:.0%}" for p in large)
        if tokens := values.get("perf/total_num_tokens"):
            yield f"{short_number(tokens / seconds)} tok/s"
        self._ends.append(time.monotonic())
        between = len(self._ends) - 1
        mean = (self._ends[-1] - self._ends[0]) / between if between else seconds
        if step < self._total:
            yield f"ETA {duration_text(mean * (self._total - step))}"


class Progress(RichProgress):
    """The current phase and the steps so far, on a terminal; nothing elsewhere.

    with Progress(total_steps=25, console=console) as progress:
        progress.enter("gen", step=1)
        progress.finish_step()
    """

    def __init__(self, total_steps: int, *, console: Console) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn()
        disable = not console.is_terminal
        super().__init__(
            *columns, MofNCompleteColumn(), console=console, transient=True, disable=disable
        )
        self._task = self.add_task("start", total=total_steps)

    def enter(self, phase: str, step: int) -> None:
        """Show the phase of `step` that begins."""
        self.update(self._task, description=f"step {step} {phase}")

    def finish_step(self) -> None:
        """Count a finished step."""
        self.advance(self._task)


def _fitting(parts: Sequence[str], room: int) -> set[str]:
    """Return the parts that fit `room` columns, two spaces before each; earlier ones go first."""
    chosen = set[str]()
    for part in parts:
        if len(part) + 2 <= room:
            room -= len(part) + 2
            chosen.add(part)
    return chosen


def _validation(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the validation metrics, with those that val/… lacks: per source, best@N and maj@N."""
    core = [(name, v) for name, v in values.items() if name.startswith("val-core/")]
    several = sum("/mean@" in name for name, _ in core) > 1  # one per source
    shown = [(n.removeprefix("val-core/"), v) for n, v in core if several or "/mean@" not in n]
    return [(n, v) for n, v in values.items() if n.startswith("val/")] + shown


def short_number(number: float) -> str:
    """Return a number in three digits: 870, 5.1k, 12M."""
    for unit in ("", "k", "M"):
        if number < 999.5:
            return f"{number:.1f}{unit}" if unit and number < 9.95 else f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.0f}G"


def duration_text(seconds: float) -> str:
    """Return a time in its two largest units, such as 45s, 12m, 1h05m, 3d04h."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 59.5:
        return f"{seconds:.0f}s"
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02}m"
    return f"{hours // 24}d{hours % 24:02}h"


class StepTrace:
    """Records a step on this rank and writes `trace/step<N>_rank<R>.json.gz` in a run's folder.

    Perfetto (ui.perfetto.dev) and chrome://tracing show the file; the phases of the step are ranges
    in it.

    step: the step to record; None for no trace.
    """

    def __init__(self, folder: Path, step: int | None, rank: int) -> None:
        self._step = step
        self._file = folder / "trace" / f"step{step}_rank{rank}.json.gz"
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        """Begin to record if this is the step."""
        if step == self._step:
            self._profile = profile()
            self._profile.start()

    def end(self) -> None:
        """Write what was recorded, if anything."""
        if self._profile is not None:
            self._profile.stop()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._file))
            self._profile = None
