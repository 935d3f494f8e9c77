"""Engines with FP8 weights."""
