"""The errors that a user can correct, exit codes, and how errors are printed.

Imports only the standard library, so that the command line and reward workers start fast.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = [
    "EXIT_STOPPED",
    "EXIT_USER_ERROR",
    "CallbackError",
    "CheckpointError",
    "ConfigError",
    "ConfigNote",
    "DataError",
    "ModelError",
    "OutputError",
    "RewardError",
    "RolloutError",
    "UsageError",
    "UserError",
    "located",
    "print_error",
    "print_note",
    "shorten",
]

EXIT_USER_ERROR = 2
EXIT_STOPPED = 3  # exit code of a run that a signal stopped; it can be resumed


class UserError(ValueError):
    """A mistake in the configuration, data, model, reward or checkpoint that a user can correct.

    The message says what was given, what was expected, and what to do; it is shown without a
    traceback.
    """


class ConfigError(UserError):
    """A configuration that cannot run: one line for each fault (key, given, expected, what to do).

    faults: the lines; the message of several is a list of them.
    """

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        several = f"{len(faults)} settings cannot be used:"
        super().__init__(faults[0] if len(faults) == 1 else "\n  ".join([several, *faults]))

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), self.faults


class CheckpointError(UserError):
    """A checkpoint cannot be written, found or read; the message names it and the reason."""


class DataError(UserError):
    """A data file or row that cannot be used; the message names file and row."""


class ModelError(UserError):
    """A model that cannot be found, loaded, run packed or saved."""


class OutputError(UserError):
    """A file of a run that cannot be written; the message names it, the reason and free space."""


class RewardError(UserError):
    """A reward function that cannot be loaded, raised, took too long, or returned no number."""


class RolloutError(UserError):
    """A rollout server that lacks an option or refuses a request; the message names its URL."""


class CallbackError(UserError):
    """A callback of the user that raised; the message names event, step, error and line."""


class UsageError(RuntimeError):
    """A method of the Python interface that was called at the wrong time."""


class ConfigNote(UserWarning):
    """A key that is accepted and has no effect here."""


def located(path: str | Path) -> str:
    """Return `path`, with the folder that it is relative to."""
    return str(path) if Path(path).is_absolute() else f"{path} (in {Path.cwd()})"


def shorten(text: str, limit: int) -> str:
    """Return `text`, cut in the middle to `limit` characters."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[half + 1 - limit :]}"


def print_error(error: Exception | str) -> None:
    """Print `error: …` in red on stderr."""
    _print(f"error: {error}", "bold red")


def print_note(note: str) -> None:
    """Print `note: …` in yellow on stderr."""
    _print(f"note: {note}", "yellow")


def _print(text: str, style: str) -> None:
    from rich.console import Console

    Console(file=sys.stderr, soft_wrap=True).print(text, style=style, markup=False, highlight=False)
