"""Sampling of tokens from logits, with the log-prob and the kept vocabulary entries."""

from .op import SampledTokens, sample_tokens

__all__ = ["SampledTokens", "sample_tokens"]
