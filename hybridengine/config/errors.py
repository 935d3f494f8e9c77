"""The error of a configuration that cannot run, and the note about a key without effect."""

from __future__ import annotations

from hybridengine.errors import UserError

__all__ = ["ConfigError", "ConfigNote"]


class ConfigError(UserError):
    """A configuration that cannot run: one line for each fault (key, given, expected, what to do).

    faults: the lines, of which the message of several is a list.
    """

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        several = f"{len(faults)} settings cannot be used:"
        super().__init__(faults[0] if len(faults) == 1 else "\n  ".join([several, *faults]))

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), self.faults


class ConfigNote(UserWarning):
    """A key that is accepted and has no effect here."""
