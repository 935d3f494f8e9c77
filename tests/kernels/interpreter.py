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
    files = [str(folder / a) if ".py" in a else a for a in arguments]
    plugins = ["-p", "no:cacheprovider", "-p", __name__]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *files],
        cwd=folder.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


def pytest_configure():
    """Let the interpreter patch triton.language once, not in every call of a function.

    That and a table that it writes anew for every element type took half of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch_language, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    patched, dtypes = {}, {}

    def patch_once(function):
        values = function.__globals__.values()
        names = frozenset(m.__name__ for m in values if m is tl or m is tl.core)
        if names not in patched:
            patched[names] = patch_language(function)
        return patched[names]

    def dtype_once(dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(dtype)
        return dtypes[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype_once
    interpreter._LangPatchScope.restore = lambda scope: None


def widen_dot(monkeypatch):
    """Let tl.dot multiply in float32.

    The interpreter represents bfloat16 by its bits and would multiply those.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data.astype(np.float32, copy=False)
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, sums, *_):
        # In the order of k, as tensor cores: BLAS and einsum choose an order by the tile's shape.
        total = sums.data.copy()
        for column, row in zip(wide(a).T, wide(b), strict=True):
            total += column[:, None] * row
        return interpreter.TensorHandle(total, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def round_to_nearest(monkeypatch):
    """Let a conversion to bfloat16 round as a GPU does; the interpreter truncates."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    truncate = interpreter._convert_float

    def convert(values, source, target, mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            bits = values.view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            values = np.where(np.isnan(values), bits, rounded).astype(np.uint32).view(np.float32)
        return truncate(values, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
