"""Log-probs over the few vocabulary entries that sampling kept, from hidden states."""

from .op import kept_log_probs, sparse_linear_token_log_probs

__all__ = ["kept_log_probs", "sparse_linear_token_log_probs"]
