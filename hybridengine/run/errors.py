"""The errors that a user can correct, exit codes, and how errors are printed.

Imports only the standard library, so that the command line and reward workers start fast.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_KEYS_IN_TEXT = re.compile(r"[\w.]*\w")

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

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), self.faults


class InvalidConfigError(ConfigError):
    """Faults of the keys of a configuration, which is otherwise usable.

    config: the configuration, with defaults in place of values that are refused or missing.
    keys: the keys of those values.
    """

    def __init__(self, config: Any, keys: Collection[str], *faults: str) -> None:
        super().__init__(*faults)
        self.config, self.keys = config, frozenset(keys)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.config, self.keys, *self.faults)


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
    """An engine that lacks an option or refuses a request; the message names a server's URL."""


class CallbackError(UserError):
    """A callback of the user that raised; the message names event, step, error and line."""


class UsageError(RuntimeError):
    """A method of the Python interface that was called at the wrong time."""


class ConfigNote(UserWarning):
    """A key that is accepted and has no effect here."""


class Faults:
    """Collect the user errors of independent checks, each a `with` block.

    given: faults of the configuration itself. What checks find about values that it refused is left
    out, and so is any other error of a check, which was not made for such a configuration.
    """

    def __init__(self, given: InvalidConfigError | None = None) -> None:
        self._given, self._errors = given, list[UserError]()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, UserError):
            self._errors.append(error)
            return True
        return self._given is not None and isinstance(error, Exception)

    def __bool__(self) -> bool:
        return self._given is not None or bool(self._errors)

    def attempt(self, call: Callable[..., T], *args: Any) -> T | None:
        """Return what `call(*args)` returns, None where it raises a user error."""
        with self:
            return call(*args)
        return None

    def report(self) -> None:
        """Raise a single error as it is, several as one ConfigError; each fault once."""
        if not self:
            return
        given, faults = self._given, list[str]()
        for error in self._errors:
            faults += error.faults if isinstance(error, ConfigError) else [str(error)]
        if given is not None:
            faults = [*given.faults, *(f for f in faults if not is_about(f, given.keys))]
        faults = list(dict.fromkeys(faults))
        if len(faults) == 1:
            raise given or self._errors[0]
        raise ConfigError(*faults)


def is_about(fault: str, keys: Collection[str]) -> bool:
    """Return whether a fault contains the full name of one of `keys`."""
    return not set(_KEYS_IN_TEXT.findall(fault)).isdisjoint(keys)


def located(path: str | Path) -> str:
    """Return `path`, with the folder that it is relative to."""
    return str(path) if Path(path).is_absolute() else f"{path} (in {Path.cwd()})"


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's message, its type where it has none.

    Advice on arguments of torch and transformers becomes that on our keys, or is left out.
    """
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0]
    if "trust_remote_code=True" in text:
        return f"{first.partition(' You can')[0]} Set model.trust_remote_code=true to run it"
    if "Weights only load failed" in text:  # with advice to execute what is in the file
        found = text.rpartition("WeightsUnpickler error:")[2].strip().splitlines()
        detail = found[0].partition(". Please")[0] if found else "it cannot be parsed"
        return f"it holds more than tensors and plain data: {detail}"
    return first


def unreadable_part(part: str, path: str, files: str, error: Exception) -> ModelError:
    """Return the error of a model whose folder has no files of a part, or unreadable ones."""
    return ModelError(
        f"the {part} of model {path!r} cannot be read ({reason_of(error)}); put {files} into the "
        "folder of its weights"
    )


def shorten(text: str, limit: int) -> str:
    """Return `text`, cut in the middle to `limit` characters."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[half + 1 - limit :]}"


def unexpected(where: str, name: str, value: Any, expected: str) -> DataError:
    """Return the error of a value that is not the `expected` one; name: its column or key."""
    return DataError(f"{where}: {name} is {shorten(repr(value), 80)}, expected {expected}")


def print_error(error: Exception | str) -> None:
    """Print `error: …` in red on stderr."""
    _print(f"error: {error}", "bold red")


def print_note(note: str) -> None:
    """Print `note: …` in yellow on stderr."""
    _print(f"note: {note}", "yellow")


def _print(text: str, style: str) -> None:
    from rich.console import Console

    Console(file=sys.stderr, soft_wrap=True).print(text, style=style, markup=False, highlight=False)
