"""Execution: pack, all-to-all, unpack into the live engine weights, verify."""
