"""What a run prints while it trains: one line per step, and the current phase on a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as RichProgress

__all__ = ["LINE_WIDTH", "Progress", "StepLine"]

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
            yield f"{_short(tokens / seconds)} tok/s"
        self._ends.append(time.monotonic())
        between = len(self._ends) - 1
        mean = (self._ends[-1] - self._ends[0]) / between if between else seconds
        if step < self._total:
            yield f"ETA {_duration(mean * (self._total - step))}"


class Progress(AbstractContextManager["Progress"]):
    """The current phase and the steps so far, on a terminal; nothing elsewhere.

    with Progress(total_steps=25, console=console) as progress:
        progress.enter("gen", step=1)
        progress.finish_step()
    """

    def __init__(self, total_steps: int, *, console: Console) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn()
        disable = not console.is_terminal
        self._bar = RichProgress(
            *columns, MofNCompleteColumn(), console=console, transient=True, disable=disable
        )
        self._task = self._bar.add_task("start", total=total_steps)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def enter(self, phase: str, step: int) -> None:
        """Show the phase of `step` that begins."""
        self._bar.update(self._task, description=f"step {step} {phase}")

    def finish_step(self) -> None:
        """Count a finished step."""
        self._bar.advance(self._task)


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


def _short(number: float) -> str:
    """Return a number in three digits: 870, 5.1k, 12M."""
    for unit in ("", "k", "M"):
        if number < 999.5:
            return f"{number:.1f}{unit}" if unit and number < 9.95 else f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.0f}G"


def _duration(seconds: float) -> str:
    """Return a time in its two largest units, such as 45s, 12m, 1h05m, 3d04h."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 59.5:
        return f"{seconds:.0f}s"
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02}m"
    return f"{hours // 24}d{hours % 24:02}h"
