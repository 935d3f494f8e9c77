"""token_log_probs: log-probability and entropy of every token, from logits, in one pass."""

from .op import RowStats, token_log_probs
from .rows import check_labels

__all__ = ["RowStats", "check_labels", "token_log_probs"]
