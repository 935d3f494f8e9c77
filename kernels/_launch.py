"""launch: run a Triton kernel on the device of its tensors.

`kernel[grid](...)` of Triton takes 20 to 60 us of Python at every call: it reads environment
variables, compares every global constant that the kernel uses, and binds the arguments. Here the
compiled kernel of a call is kept, and is launched again for arguments for which Triton would
compile the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. (Triton's own function takes 5 us.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n, for n > 0."""
    return 1 << (n - 1).bit_length()


def _constant(value: Any) -> Any:
    return value


def _type(value: Any) -> Any:
    """Return what Triton compiles for of an argument that is not specialized: its type."""
    if type(value) is int:
        return 32 if -(2**31) <= value < 2**31 else value < 2**63
    return type(value)


def _specialized(value: Any) -> Any:
    """Return what Triton compiles for of an argument: its type, and divisibility by 16."""
    if type(value) is int:
        if value == 1:
            return "1"
        return value % 16 == 0 if -(2**31) <= value < 2**31 else (value % 16 == 0, value < 2**63)
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(map(_specialized, value))
    return type(value)


class Forms:
    """The compiled forms of a kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._names = [parameter.name for parameter in kernel.params]
        self._classes = [_class_of(parameter) for parameter in kernel.params]
        self._compiled: dict[tuple, Any] = {}

    def launch(
        self, device: int | None, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]
    ) -> None:
        values = [*arguments, *map(options.pop, self._names[len(arguments) :])]
        classes = [of(value) for of, value in zip(self._classes, values, strict=True)]
        key = (device, *classes, *options.items())
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*values, **options)
        else:
            compiled[(*grid, 1, 1)](*values)


def _class_of(parameter: Any) -> Callable[[Any], Any]:
    if parameter.is_constexpr:
        return _constant
    return _type if parameter.do_not_specialize else _specialized


_FORMS: dict[int, Forms] = {}  # by the id of a kernel, which its Forms keeps alive


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch `kernel[grid]` on the device of the first tensor of `arguments`.

    Triton itself launches on the current device, which need not be that of the tensors.
    """
    flat = (x for one in arguments for x in (one if type(one) is tuple else (one,)))
    device = next(value.device for value in flat if isinstance(value, Tensor))
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        if not isinstance(kernel, triton.JITFunction):  # the interpreter
            kernel[grid](*arguments, **options)
            return
        forms = _FORMS.get(id(kernel))
        if forms is None:
            forms = _FORMS[id(kernel)] = Forms(kernel)
        forms.launch(device.index, grid, arguments, options)
