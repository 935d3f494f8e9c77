"""Benchmarks: `python -m benchmarks <op> [--json FILE [--resume]] [--device cpu|cuda] [--quick]`.

One module with `run(bench)` per operator, and some for whole steps. Every rate is compared with a
peak of the machine that is measured in the same run, and every baseline runs in the same process on
the same inputs. The JSON file is written after every row. Rows of a GPU say how they were timed
(`timing`), the time of Python and launches (`host_ms`), and the file its clocks and temperature.
"""

import sys

import hybridengine.kernels

# As in tests/__init__.py: transformers would import the folder `kernels` a second time.
sys.modules.setdefault("kernels", hybridengine.kernels)
