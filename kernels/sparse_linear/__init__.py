"""Log-probs over the few vocabulary entries that sampling kept, from hidden states."""

from .op import sparse_linear_token_log_probs

__all__ = ["sparse_linear_token_log_probs"]
