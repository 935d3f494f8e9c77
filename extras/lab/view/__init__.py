"""Look at the rollouts of a run: in the terminal, or in one HTML page."""
