"""Operators on hidden states and the output head's weight, without [T, V] logits."""

from .logprob import linear_token_log_probs
from .mixed_gemm import has_fast_products
from .policy_loss import linear_policy_loss

__all__ = ["has_fast_products", "linear_policy_loss", "linear_token_log_probs"]
