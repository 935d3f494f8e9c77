"""Built-in reward functions, called in the same way as a user's own."""
