"""The built-in reward rules."""
