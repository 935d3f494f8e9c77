"""Operators on hidden states and the output head's weight, without [T, V] logits."""

from ..gemm import has_fast_products
from .cross_entropy import linear_cross_entropy
from .distillation import linear_distillation_loss
from .logprob import LinearStats, linear_token_log_probs
from .policy_loss import linear_policy_loss
from .shared_rows import shares_rows, take_rows

__all__ = [
    "LinearStats",
    "has_fast_products",
    "linear_cross_entropy",
    "linear_distillation_loss",
    "linear_policy_loss",
    "linear_token_log_probs",
    "shares_rows",
    "take_rows",
]
