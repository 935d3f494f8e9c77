"""The one error of this package's model layer."""

from hybridengine.errors import UserError

__all__ = ["ModelError"]


class ModelError(UserError):
    """A model cannot be found, loaded, run packed or saved; the message says what to do."""
