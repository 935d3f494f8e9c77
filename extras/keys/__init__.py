"""Key names of verl and TRL."""
