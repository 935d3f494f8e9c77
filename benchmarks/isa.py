"""Running as on a CPU with a narrower instruction set: every library has a variable of its own.

env $(python -m benchmarks.isa avx2) COMMAND
"""

from __future__ import annotations

import os
import sys

_AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}
# By name, the environment that limits this package, vLLM's kernels, oneDNN, MKL and ATen.
LIMITS = {
    "portable": _AVX2 | {"HYBRIDENGINE_ISA": "portable"},
    "avx2": _AVX2 | {"HYBRIDENGINE_ISA": "avx2"},
}


def limit_isa(name: str) -> None:
    """Start this command again under the limit, unless it already runs under it."""
    wanted = LIMITS[name]
    if any(os.environ.get(key) != value for key, value in wanted.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})


if __name__ == "__main__":
    print(*(f"{key}={value}" for key, value in LIMITS[sys.argv[1]].items()))
