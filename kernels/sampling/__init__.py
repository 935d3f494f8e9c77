"""Sampling of tokens from logits, with the log-prob and the kept vocabulary entries."""

from .likely import likely_log_probs, ragged_likely
from .op import SampledTokens, sample_tokens

__all__ = ["SampledTokens", "likely_log_probs", "ragged_likely", "sample_tokens"]
