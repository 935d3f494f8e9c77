"""Source: the trainer's tensors, adapters merged, and what changed in them."""
