"""launch: run a Triton kernel on the device of its tensors.

`kernel[grid](...)` of Triton takes 20 to 60 us of Python at every call: it reads environment
variables, compares every global constant that the kernel uses, and writes the options as text. Here
the compiled kernel of a call is kept, and is launched again for arguments for which Triton compiles
the same: its own binder says what it compiles for.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import create_function_from_signature

# Of every compilation. Triton 3.10 does not fuse multiplication and addition by default, earlier
# versions do: the bits of exact operators would depend on its version.
COMPILE_OPTIONS = {"enable_fp_fusion": True}


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. (Triton's own function takes 5 us.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n, for n > 0."""
    return 1 << (n - 1).bit_length()


class Forms:
    """The compiled forms of a kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        backend = make_backend(driver.active.get_current_target())
        self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self._compiled: dict[tuple, Any] = {}

    def launch(
        self, device: int | None, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]
    ) -> None:
        bound, compiled_for, flags = self._bind(*arguments, **options)
        key = (device, *compiled_for, *flags.items())
        compiled = self._compiled.get(key)
        if compiled is None:
            launcher = self._kernel[grid]
            self._compiled[key] = launcher(*arguments, **options, **COMPILE_OPTIONS)
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream, values = driver.active.get_current_stream(device), bound.values()
        metadata = None
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            metadata = compiled.launch_metadata((x, y, z), stream, *values)
        else:  # chains without hooks, which Triton would call
            enter = leave = None
        function, packed = compiled.function, compiled.packed_metadata
        compiled.run(x, y, z, stream, function, packed, metadata, enter, leave, *values)


def _device_of(values: tuple) -> Any:
    """Return the device of the first tensor in `values` and the tuples in it, or None."""
    for value in values:
        if isinstance(value, tuple):  # asked first: that of a tensor takes three times as long
            if (device := _device_of(value)) is not None:
                return device
        elif isinstance(value, Tensor):
            return value.device
    return None


_FORMS: dict[int, Forms] = {}  # by the id of a kernel, which its Forms keeps alive


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch `kernel[grid]` on the device of the first tensor of `arguments`.

    Triton itself launches on the current device, which need not be that of the tensors.
    """
    device = _device_of(arguments)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **options)
        return
    forms = _FORMS.get(id(kernel))
    if forms is None:
        if not isinstance(kernel, triton.JITFunction):  # the interpreter
            kernel[grid](*arguments, **options)
            return
        forms = _FORMS[id(kernel)] = Forms(kernel)
    forms.launch(device.index, grid, arguments, options)
