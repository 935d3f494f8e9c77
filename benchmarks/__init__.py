"""Benchmarks: `python -m benchmarks <op> [--json FILE] [--device cpu|cuda] [--quick] [--isa avx2]`.

One module with `run(bench)` per operator, and some for whole steps. Every rate is compared with a
peak of the machine that is measured in the same run, and every baseline runs in the same process on
the same inputs.
"""
