"""once: what every layer would compute again from the same tensors of a micro-batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

Value = TypeVar("Value")


class _Result(NamedTuple):
    state: tuple[Any, ...]
    others: list[TensorWeakRef | None]  # of the other tensors, which may be of the first's results
    value: Any  # None: the first tensor itself, which must not keep itself


class _Results:
    """The results by key that belong to a tensor, and go with it."""

    def __init__(self, owner: Tensor) -> None:
        number, results = id(owner), _RESULTS  # globals are gone when a process ends
        self.owner = ref(owner, lambda _: results.pop(number, None))
        self.by_key: dict[Hashable, _Result] = {}


_RESULTS: dict[int, _Results] = {}  # by the id of their tensor


def once(key: Hashable, compute: Callable[..., Value], *tensors: Tensor | None) -> Value:
    """Return compute(*tensors), kept as long as the first tensor lives and none of them is written.

    Of every key the last result is kept. A traced call and one that a CUDA graph records compute it
    again: a replay reads what was written since.

    Args:
        key: names the computation, with all else that the result depends on.
        tensors: the first one is not None.
    """
    first = tensors[0]
    if torch.compiler.is_compiling() or type(first) is not Tensor or _must_repeat(first):
        return compute(*tensors)
    results = _RESULTS.get(id(first))
    if results is None or results.owner() is not first:
        results = _RESULTS[id(first)] = _Results(first)
    stream = torch.cuda.current_stream(first.device).stream_id if first.is_cuda else None
    state = (stream, *[None if one is None else one._version for one in tensors])
    known = results.by_key.get(key)
    if known is not None and known.state == state:
        others = [None if other is None else other() for other in known.others]
        if all(map(operator.is_, others, tensors[1:])):
            return first if known.value is None else known.value  # type: ignore[return-value]
    value = compute(*tensors)
    references = [None if one is None else TensorWeakRef(one) for one in tensors[1:]]
    results.by_key[key] = _Result(state, references, None if value is first else value)
    return value


def _must_repeat(tensor: Tensor) -> bool:
    """Return whether writes are not counted, or operations are recorded to run again."""
    if tensor.is_inference() or torch._C._are_functorch_transforms_active():
        return True
    if torch._C._len_torch_dispatch_stack() and (  # quick; the next takes five times as long
        torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    ):
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
