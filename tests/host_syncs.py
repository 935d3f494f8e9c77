"""What a CUDA graph cannot capture, found on a CPU: reads by the host, and shapes from values.

A tensor that is made of the given ones is taken for one on a device. What only a CPU does for the
sake of its user, such as a check of values, is off (`_check.readable`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hybridengine.kernels import _check

_aten = torch.ops.aten
_READS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
_SHAPES = {  # of a result, by values
    *(_aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default),
    *(_aten.unique_consecutive.default, _aten.unique_dim.default, _aten.bincount.default),
}
_METHODS = (  # of a tensor on a CPU they read memory without an operator
    *(Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.item),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
)


class HostSync(AssertionError):
    """The host would wait for the device."""


@contextmanager
def refuse_host_syncs(inputs: Iterable[Tensor] | None = None) -> Iterator[None]:
    """Raise HostSync where the host reads `inputs`, or what is computed of them, in the context.

    None: every tensor is on the device. The same error where the shape of a result depends on
    values, and where a tensor is made of values of the host, which a replay would not copy again.
    It names the operator and the line.
    """
    on_device = _OnDevice(inputs)
    with patch.object(_check, "readable", lambda tensor: False), on_device, _Methods(on_device):
        yield


class _OnDevice(TorchDispatchMode):
    def __init__(self, inputs: Iterable[Tensor] | None) -> None:
        super().__init__()
        self._has_all = inputs is None
        self._kept = list(inputs or ())  # so that no other tensor gets the memory of one
        self._memory = {x.untyped_storage()._cdata for x in self._kept}

    def has(self, *values: Any) -> bool:
        tensors = (x for x in tree_iter(values) if isinstance(x, Tensor))
        return any(self._has_all or x.untyped_storage()._cdata in self._memory for x in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.lift_fresh.default:
            _refuse(func, "makes a tensor of values of the host")
        is_on_device = self.has(args, kwargs)
        if is_on_device:
            if func in _READS:
                _refuse(func, "reads values of the device")
            by_values = func in _SHAPES
            if func is _aten.index.Tensor or func is _aten.index_put_.default:
                masks = (torch.bool, torch.uint8)
                by_values = any(x is not None and x.dtype in masks for x in args[1])
            if func is _aten.repeat_interleave.Tensor:
                by_values = kwargs.get("output_size") is None
            if by_values:
                _refuse(func, "has a result whose shape depends on values of the device")
        result = func(*args, **kwargs)
        if is_on_device and not self._has_all:
            for made in tree_iter(result):
                if isinstance(made, Tensor):
                    self._kept.append(made)
                    self._memory.add(made.untyped_storage()._cdata)
        return result


class _Methods(TorchFunctionMode):
    def __init__(self, on_device: _OnDevice) -> None:
        super().__init__()
        self._on_device = on_device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS and self._on_device.has(args):
            _refuse(func, "reads values of the device")
        return func(*args, **(kwargs or {}))


def _refuse(func: Any, why: str) -> None:
    here = [x for x in traceback.extract_stack() if "torch/" not in x.filename]
    where = next(x for x in reversed(here) if x.filename != __file__)
    name = getattr(func, "__name__", str(func))
    raise HostSync(f"{name} {why}: {where.filename}:{where.lineno}: {where.line}")
