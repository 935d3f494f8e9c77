"""Run tests with Triton's interpreter, which must be enabled before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(*arguments: str) -> None:
    """Run pytest in a new process with TRITON_INTERPRET=1.

    arguments: test files, relative to tests/kernels, and options of pytest.
    """
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


def widen_dot(monkeypatch):
    """Let tl.dot take bfloat16, which the interpreter represents by its bits and would multiply."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, sums, *_):
        # Not matmul: in some BLAS kernels the sum of a row depends on its position in the tile.
        product = np.einsum("mk,kn->mn", wide(a), wide(b), dtype=sums.data.dtype)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
