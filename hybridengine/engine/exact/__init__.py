"""Engines whose log-probs are the trainer's bits."""
