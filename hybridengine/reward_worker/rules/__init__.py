"""Built-in rules: reward functions of this package, called as a user's own."""
