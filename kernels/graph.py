"""Kernel calls of a function on the CPU, captured once and replayed without Python."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ._backend import native

__all__ = ["Graph"]


class Graph:
    """The kernel calls of a function of tensors with a leading dimension of rows.

    A replay reads and writes the memory that the captured calls had, which the graph keeps, and
    takes the place of all Python between them. The function may compute by kernels of this package
    that go row by row alone (`decode_linear`, `rms_norm`, `gated_activation`, the rotary
    embedding, `write_kv_cache`, and `paged_attention` with one query per sequence), and may view
    and allocate tensors. What it decides by in Python must not change.

    Attributes:
        output: [rows, ...] of the captured call, which a replay overwrites.
        refused: why it cannot be replayed; empty if it can.
        bytes: of the tensors between the kernels.
    """

    def __init__(
        self, function: Callable[[], Tensor], rows: int, inner_ops: Collection[str] = ()
    ) -> None:
        """Call `function` once, and capture it.

        inner_ops: ops of torch.library, by name, that call one kernel each.
        """
        extension = native()
        if extension is None:
            raise RuntimeError("a graph needs the extension hybridengine._C, which is not built")
        self._function = function  # and with it the tensors whose memory a replay reads
        self._graph = extension.Graph(rows)
        self._watch = _Watch(self._graph, inner_ops)
        self._graph.begin()
        try:
            with self._watch:
                self.output = function()
        finally:
            self.refused: str = self._graph.end()
        if not isinstance(self.output, Tensor):
            self.refused = self.refused or f"it returns {type(self.output).__name__}, no tensor"
        self.rows = rows
        self.bytes: int = self._graph.bytes

    def replay(self, rows: int) -> Tensor:
        """Make the captured calls with so many rows; return those of the output.

        Raises:
            ValueError: there were fewer rows, the graph was refused, or a kernel finds that values
                of its operands do not fit.
        """
        self._graph.replay(rows)
        return self.output[:rows]


class _Watch(TorchDispatchMode):
    """Refuses a graph that torch computes something for, and keeps the tensors that it makes."""

    def __init__(self, graph: Any, inner_ops: Collection[str]) -> None:
        super().__init__()
        self._graph, self._inner_ops = graph, inner_ops
        self._kept: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        calls = self._graph.num_calls
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATE:
            self._kept.append(result)
        elif func.namespace == "hybridengine" or func.name() in self._inner_ops:
            if self._graph.num_calls != calls + 1:
                self._graph.refuse(f"{func.name()} is no call of one kernel here")
        elif not func.is_view:
            self._graph.refuse(f"torch computes {func.name()}")
        return result


_aten = torch.ops.aten
_ALLOCATE = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default)
