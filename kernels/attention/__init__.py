"""Causal attention over a packed forest of token runs."""

from .op import tree_attention

__all__ = ["tree_attention"]
