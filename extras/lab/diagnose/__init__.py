"""Compare runs and name their problems, from what they logged."""
