"""The trainer: thin, one straight line per step; the kernels carry the weight."""
