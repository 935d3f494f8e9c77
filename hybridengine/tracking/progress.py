"""One progress line: phase, step, tokens per second, time left."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

_PLAIN_LINE_EVERY_S = 10.0  # without a terminal


class Progress(AbstractContextManager["Progress"]):
    """A progress bar on a terminal; elsewhere a plain line at most every ten seconds.

    with Progress(total_steps=25, console=console) as progress:
        progress.enter("gen", step=1)
        progress.finish_step(tokens=4096)
    """

    def __init__(self, total_steps: int, *, console: Console) -> None:
        self._console = console
        self._began, self._last_line = time.monotonic(), -_PLAIN_LINE_EVERY_S
        self._bar = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._bar.add_task("start", total=total_steps, rate="")
        [self._task] = self._bar.tasks

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def enter(self, phase: str, step: int) -> None:
        """Show the phase of `step` that begins."""
        self._show(f"step {step} {phase}")

    def finish_step(self, tokens: int) -> None:
        """Count a finished step in which `tokens` tokens (prompt and response) were processed."""
        seconds, self._began = time.monotonic() - self._began, time.monotonic()
        self._bar.update(self._task.id, advance=1, rate=f"{tokens / seconds:,.0f} tokens/s")
        self._show(f"step {self._task.completed:.0f} done")

    def _show(self, description: str) -> None:
        task, now = self._task, time.monotonic()
        is_same = description == task.description
        self._bar.update(task.id, description=description)
        if self._console.is_terminal or is_same or now - self._last_line < _PLAIN_LINE_EVERY_S:
            return
        self._last_line = now
        seconds = task.time_remaining
        left = f"{timedelta(seconds=round(seconds))} left" if seconds else ""
        parts = (f"[{task.completed:.0f}/{task.total:.0f}]", description, task.fields["rate"], left)
        self._console.print("  ".join(filter(None, parts)), markup=False, soft_wrap=True)
