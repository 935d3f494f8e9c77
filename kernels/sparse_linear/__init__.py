"""Log-probs and losses over the few vocabulary entries that sampling kept, from hidden states."""

from .op import kept_log_probs, sparse_linear_token_log_probs
from .policy_loss import sparse_linear_policy_loss

__all__ = ["kept_log_probs", "sparse_linear_policy_loss", "sparse_linear_token_log_probs"]
