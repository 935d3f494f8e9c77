"""Benchmarks: `python -m benchmarks <op> [--json FILE] [--device cpu|cuda] [--quick] [--isa avx2]`.

One module per operator, with `run(bench)`; every figure is a share of a limit of the machine that
is measured in the same run, and every peer runs in the same process on the same inputs.
"""
