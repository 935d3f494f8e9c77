"""Run tests with Triton's interpreter, which must be enabled before Triton is imported."""

import dataclasses
import os
import sys
from pathlib import Path

from tests.forked import run_forked
from tests.ranks import Server

_SERVER = Server(
    "tests",
    "pytest",
    "hypothesis",
    "torch._dynamo",
    "triton.runtime.interpreter",
    "hybridengine.kernels",
    TRITON_INTERPRET="1",
)


def run_interpreted(*arguments: str) -> None:
    """Run pytest in a fork of a process that began with TRITON_INTERPRET=1.

    arguments: test files, relative to tests/kernels, and options of pytest.
    """
    folder = Path(__file__).parent
    files = [str(folder / a) if ".py" in a else a for a in arguments]
    plugins = ["-p", "no:cacheprovider", "-p", __name__, "--rootdir", folder.parents[1]]
    done = run_forked(
        [sys.executable, "-m", "pytest", "-q", *plugins, *files],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        server=_SERVER,
        timeout=500,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr


def pytest_configure():
    """Let the interpreter do once what it would do in every call of a function or operation.

    It computes the same: what is left out took three quarters of its time.
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
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # then it computes whether integers overflow, but not asserts
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _share_types(tl.core)
    _skip_broadcasts(type(interpreter.interpreter_semantic))


def _share_types(core):
    """Make one block type for each element type and shape, and its tensors' shape once."""
    init_block, init_tensor = core.block_type.__init__, core.tensor.__init__
    shared = {}

    def new_block(cls, element_ty, shape):
        key = id(element_ty), *(core._unwrap_if_constexpr(size) for size in shape)
        if key not in shared:
            made = object.__new__(cls)
            init_block(made, element_ty, shape)  # refers to the element type: the id stays its own
            shared[key] = made
        return shared[key]

    def new_tensor(self, handle, type):
        attributes = vars(type).get("of_tensors")
        if attributes is None:
            init_tensor(self, handle, type)
            type.of_tensors = {k: v for k, v in vars(self).items() if k != "handle"}
        else:
            vars(self).update(attributes)
            self.handle = handle

    core.block_type.__new__ = new_block
    core.block_type.__init__ = lambda self, element_ty, shape: None
    core.tensor.__init__ = new_tensor


def _skip_broadcasts(semantic):
    """Do not compare constants of shapes that are the same."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_unequal(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block():
            same = lhs.type.shape.values == rhs.type.shape.values
        else:
            same = lhs.type.is_block() == rhs.type.is_block()
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_unequal


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
        columns, rows = np.moveaxis(wide(a), -1, 0), np.moveaxis(wide(b), -2, 0)
        for column, row in zip(columns, rows, strict=True):
            total += column[..., None] * row[..., None, :]
        return interpreter.TensorHandle(total, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def cut_sums(monkeypatch):
    """Let tl.dot multiply float32 as tensor cores do: three products of TF32, sums cut toward zero.

    They are cut after 4 products, as on an A100 (by the literature; not verified on one).
    """
    import numpy as np
    from triton.runtime import interpreter

    def rounded(x):
        return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)

    def cut(exact):
        near = exact.astype(np.float32)
        return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)

    def add_product(total, a, b):
        for k in range(0, a.shape[-1], 4):
            part = a[..., k : k + 4].astype(np.float64) @ b[..., k : k + 4, :].astype(np.float64)
            total = cut(total + part)
        return total

    def create_dot(self, a, b, sums, *_):
        a, b = (np.ascontiguousarray(x.data) for x in (a, b))
        high_a, high_b = rounded(a), rounded(b)
        total = add_product(np.zeros_like(sums.data), rounded(a - high_a), high_b)
        total = add_product(total, high_a, rounded(b - high_b)) + sums.data
        return interpreter.TensorHandle(add_product(total, high_a, high_b), sums.dtype.scalar)

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


def take_triton_kernels(monkeypatch):
    """Let operators with backend="triton" run their Triton kernels on CPU tensors."""
    from hybridengine.kernels import (
        _backend,
        causal_conv1d_triton,
        layer_triton,
        linear_recurrence_triton,
        linear_recurrence_triton_backward,
    )

    widen_dot(monkeypatch)
    round_to_nearest(monkeypatch)
    monkeypatch.setattr(_backend, "why_unavailable", lambda *_: None)
    recurrence = (linear_recurrence_triton, linear_recurrence_triton_backward)
    for name, kernels in (
        ("layer", layer_triton),
        ("causal_conv1d", causal_conv1d_triton),
        ("linear_recurrence", recurrence),
    ):
        module = sys.modules[f"hybridengine.kernels.{name}"]
        monkeypatch.setattr(module, "kernels_for", lambda _, kernels=kernels: kernels)
