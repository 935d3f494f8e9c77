"""token_log_probs: log-probability and entropy of every token, from logits, in one pass."""

from .cross_entropy import cross_entropy
from .op import RowStats, token_entropy, token_log_probs
from .rows import check_labels

__all__ = ["RowStats", "check_labels", "cross_entropy", "token_entropy", "token_log_probs"]
