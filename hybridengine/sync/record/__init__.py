"""How an engine loads a checkpoint, recorded as strided copies."""
