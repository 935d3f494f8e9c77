"""The one error of this package's model layer."""

__all__ = ["ModelError"]


class ModelError(ValueError):
    """A model cannot be found, loaded, run packed or saved; the message says what to do."""
