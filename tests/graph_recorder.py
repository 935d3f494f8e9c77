"""Captures on a CPU what a CUDA graph captures on a GPU: calls of operators on memory that stays.

A replay makes the recorded calls, on the same memory and without the Python around them. So what a
pass decides by in Python, or reads from elsewhere, shows as a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from tests.host_syncs import refuse_host_syncs


class Recorder:
    """Stands in for `hybridengine.compile.graphs.CudaGraphs`.

    Captures of a CUDA graph share memory. So a replay fills what other recordings have made with
    NaN, unless it is the backward right after its forward.

    captured: recordings; replayed: the number of replays.
    """

    def __init__(self) -> None:
        self.runs = self.replayed = 0
        self.captured: list[_Recording] = []
        self._last: int | None = None

    def warm_up(self, work: Callable[[], Any]) -> Any:
        with refuse_host_syncs():
            return work()

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        recording = _Recording()
        with refuse_host_syncs(), recording:
            result = work()
        recording.restore()
        index = len(self.captured)
        self.captured.append(recording)

        def replay() -> None:
            for i, other in enumerate(self.captured):
                if i != index and not (i == index - 1 == self._last):
                    other.spoil()
            recording.replay()
            self._last, self.replayed = index, self.replayed + 1

        return result, replay


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self._made: dict[int, Tensor] = {}
        self._written: dict[int, tuple[Tensor, Tensor]] = {}  # memory from before, and its values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        given = {_memory(x) for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_iter(value):
                    self._keep(tensor)
        result = func(*args, **kwargs)
        results = [x for x in tree_iter(result) if isinstance(x, Tensor)]
        new = [None if _memory(x) in given else x.detach() for x in results]
        self._made |= {_memory(x): x for x in new if x is not None}
        self._calls.append((func, args, kwargs, new))
        return result

    def _keep(self, tensor: Tensor) -> None:
        if _memory(tensor) not in self._made and _memory(tensor) not in self._written:
            self._written[_memory(tensor)] = _bytes(tensor), _bytes(tensor).clone()

    def restore(self) -> None:
        """Undo what the capture has written: a CUDA graph computes nothing before a replay."""
        for memory, values in self._written.values():
            memory.copy_(values)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, new in self._calls:
            results = [x for x in tree_iter(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for memory, value in zip(new, results, strict=True):
                if memory is not None:
                    assert memory.shape == value.shape
                    memory.copy_(value)

    def spoil(self) -> None:
        for tensor in self._made.values():
            _bytes(tensor).fill_(255)  # NaN; -1 of integers


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
