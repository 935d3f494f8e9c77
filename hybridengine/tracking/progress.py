"""One line that says where the run is: phase, step, tokens per second, time left."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

__all__ = ["Progress"]

_PLAIN_LINE_EVERY_S = 10.0  # without a terminal: often enough to see life, rare enough to read


class Progress:
    """A live bar on a terminal; elsewhere a plain line at most every ten seconds.

    with Progress(total_steps=25, console=console) as progress:
        progress.enter("gen", step=1)
        progress.finish_step(tokens=4096)
    """

    def __init__(self, total_steps: int, *, console: Console | None = None) -> None:
        self._console = console or Console()
        self._total = total_steps
        self._done = 0
        self._step_s: list[float] = []
        self._step_began = time.monotonic()
        self._last_line = -_PLAIN_LINE_EVERY_S
        self._rate = self._left = ""
        self._bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar = RichProgress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("start", total=self._total, rate="", left="")
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def enter(self, phase: str, step: int) -> None:
        """Show that `phase` of `step` has begun."""
        self._show(f"step {step} {phase}")

    def finish_step(self, tokens: int) -> None:
        """Count a finished step in which `tokens` tokens (prompt and response) were processed."""
        now = time.monotonic()
        self._step_s.append(now - self._step_began)
        self._step_began = now
        self._done += 1
        recent = self._step_s[-5:]  # the first step is slow: kernels warm up
        left_s = (self._total - self._done) * sum(recent) / len(recent)
        self._rate = f"{tokens / self._step_s[-1]:,.0f} tokens/s"
        self._left = f"{_clock(left_s)} left"
        self._show(f"step {self._done} done")

    def _show(self, description: str) -> None:
        if self._bar is not None:
            self._bar.update(
                self._task,
                description=description,
                completed=self._done,
                rate=self._rate,
                left=self._left,
            )
            return
        now = time.monotonic()
        if now - self._last_line >= _PLAIN_LINE_EVERY_S:
            self._last_line = now
            parts = (f"[{self._done}/{self._total}]", description, self._rate, self._left)
            self._console.print("  ".join(p for p in parts if p), markup=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
