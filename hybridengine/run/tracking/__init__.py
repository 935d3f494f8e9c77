"""Metrics of a run: console, files, traces, curves."""
