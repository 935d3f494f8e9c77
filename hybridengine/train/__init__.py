"""The trainers, and what they train on."""
