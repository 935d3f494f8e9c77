"""Commit: what trainers and engines in different worlds agree on; dropped and returning engines."""
