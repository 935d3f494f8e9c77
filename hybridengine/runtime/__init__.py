"""Ranks: their process group and phases, and what happens when one fails, stalls or is stopped."""
