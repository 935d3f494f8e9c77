"""The output of a run: metrics, progress, rollouts, learning curves, summary."""
