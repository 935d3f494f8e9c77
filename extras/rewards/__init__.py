"""Reward functions in worker processes, behind a URL, and by verl's managers."""
