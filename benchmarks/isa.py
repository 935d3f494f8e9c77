"""Limit the CPU instruction set, through the environment variable that each library has for it.

env $(python -m benchmarks.isa avx2) COMMAND; avx512 is AVX-512 without products of bfloat16.
"""

from __future__ import annotations

import os
import sys
import tempfile
from getpass import getuser

_AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    # torch.compile's cache ignores the line above: kernels of wider vectors would be taken from it.
    "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{getuser()}_avx2",
}
# By name, the environment that limits this package, vLLM's kernels, oneDNN, MKL and ATen.
LIMITS = {
    "portable": _AVX2 | {"HYBRIDENGINE_ISA": "portable"},
    "avx2": _AVX2 | {"HYBRIDENGINE_ISA": "avx2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "HYBRIDENGINE_ISA": "avx512"},
}


def is_limited() -> bool:
    """Whether this process runs under one of LIMITS."""
    return any(limit.items() <= os.environ.items() for limit in LIMITS.values())


def limit_isa(name: str) -> None:
    """Restart this command under the limit, unless it already runs under it."""
    if not LIMITS[name].items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **LIMITS[name]})


if __name__ == "__main__":
    print(*(f"{key}={value}" for key, value in LIMITS[sys.argv[1]].items()))
