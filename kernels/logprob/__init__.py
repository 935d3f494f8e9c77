"""token_log_probs: log-probability and entropy of every token, from logits, in one pass."""

from .op import RowStats, check_labels, token_log_probs

__all__ = ["RowStats", "check_labels", "token_log_probs"]
