"""Training from the engine's own weights."""
