"""What a user can mend: one error class for it, its exit code, and how it is printed.

Light on purpose: the command line reports a wrong setting without loading torch.
"""

from __future__ import annotations

import sys

__all__ = ["EXIT_USER_ERROR", "ModelError", "UserError", "print_error", "print_note"]

EXIT_USER_ERROR = 2


class UserError(ValueError):
    """A mistake in the configuration, data, model, reward or checkpoint that a user can correct.

    The message says what was given, what was expected, and what to do; it is shown without a
    traceback.
    """


def print_error(error: Exception | str) -> None:
    """Print `error: …` in red on stderr."""
    _print(f"error: {error}", "bold red")


def print_note(note: str) -> None:
    """Print `note: …` in yellow on stderr."""
    _print(f"note: {note}", "yellow")


def _print(text: str, style: str) -> None:
    from rich.console import Console

    Console(file=sys.stderr, soft_wrap=True).print(text, style=style, markup=False, highlight=False)


class ModelError(UserError):
    """A model cannot be found, loaded, run packed or saved; the message says what to do."""
