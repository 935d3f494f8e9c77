"""Parameters whose values are an engine's FP8 weights, dequantized layer by layer (as in QLoRA)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from hybridengine.kernels.block_quantize import BLOCK, block_quantize
from hybridengine.model.shared_weights import LayeredWeights, parameter_views
from hybridengine.sync.layout import EngineLayout, LayoutError, Shape


class _Rows(NamedTuple):
    """The rows of a quantized engine tensor that are a parameter.

    tensor: name of the engine's tensor.
    first: the first row, counted over all leading dimensions.
    values: float8, in the shape of the parameter.
    scale: the engine's tensor of scales, float32 [rows of blocks, blocks of a row].
    blocks: of each row of the parameter the row of `scale`.
    """

    tensor: str
    first: int
    values: Tensor
    scale: Tensor
    blocks: Tensor


class DequantizedWeights(LayeredWeights):
    """Full parameters by name: an engine's FP8 values times the scales of their blocks.

    An unquantized parameter is a view of the engine's tensors. A quantized one is dequantized by
    `gather`: a float32 product, rounded to `dtype`.

    layout: of the engine tensors `weights`, each of which is on this rank in full.
    shapes: of the parameters.
    dtype: of the computation.

    Raises LayoutError for a parameter that the engine holds in another form.
    """

    origin = "dequantized layer by layer"

    def __init__(
        self,
        layout: EngineLayout,
        weights: Mapping[str, Tensor],
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
    ) -> None:
        self._layout, self._weights = layout, weights
        sources = {c.source for c in layout.copies if c.destination in layout.quantized}
        self._quantized = frozenset(name for name in shapes if name in sources)
        plain = {name: shape for name, shape in shapes.items() if name not in sources}
        views = parameter_views(layout, weights, plain, dtype)
        self._rows = {name: self._rows_of(name, shapes[name]) for name in self._quantized}
        self._tensors = {}
        for name, shape in shapes.items():
            if name in views:
                self._tensors[name] = views[name]
            else:
                device = self._rows[name].values.device
                self._tensors[name] = torch.empty(shape, dtype=dtype, device=device)
                self._tensors[name].untyped_storage().resize_(0)
        self._loaded: dict[str, Tensor] = {}  # engine tensor → its values before quantization
        self._missing: dict[str, int] = {}  # of which so many elements are not there yet

    @property
    def sliced(self) -> frozenset[str]:
        return self._quantized

    def start(self, names: Iterable[str]) -> None:
        """Do nothing: nothing is received."""

    @torch.no_grad()
    def gather(self, names: Iterable[str]) -> None:
        for name in self._quantized.intersection(names):
            tensor = self._tensors[name]
            if not tensor.untyped_storage().nbytes():
                rows = self._rows[name]
                scales = rows.scale[rows.blocks].view(*tensor.shape[:-1], -1)
                dequantize(rows.values, scales, self._allocate(name))

    @contextmanager
    def writing(self, name: str) -> Iterator[Tensor]:
        """Yield memory for a full parameter.

        An engine's tensor is quantized when all parameters that it consists of are there, as by
        vLLM: a block may contain rows of two of them.
        """
        if name not in self._quantized:
            yield self._tensors[name]
            return
        full = self._allocate(name)
        yield full
        rows = self._rows[name]
        quantized = self._weights[rows.tensor]
        dtype = self._layout.quantized[rows.tensor].dtype
        loaded = self._loaded.setdefault(rows.tensor, torch.empty_like(quantized, dtype=dtype))
        start = rows.first * full.shape[-1]
        loaded.view(-1)[start : start + full.numel()].copy_(full.view(-1))
        missing = self._missing.get(rows.tensor, quantized.numel()) - full.numel()
        self._missing[rows.tensor] = missing
        self.free([name])
        if not missing:
            values, scales = block_quantize(self._loaded.pop(rows.tensor))
            quantized.copy_(values)
            rows.scale.copy_(scales.flatten(0, -2))
            del self._missing[rows.tensor]

    def _rows_of(self, name: str, shape: Shape) -> _Rows:
        copies = [c for c in self._layout.copies if c.source == name]
        destination = copies[0].destination
        values, scale = self._weights[destination], self._layout.quantized[destination].scale
        plain = EngineLayout({destination: self._layout.destinations[destination]}, copies)
        view = parameter_views(plain, self._weights, {name: shape}, values.dtype)[name]
        *leading, num_rows, width = values.shape
        first, remainder = divmod(int(view.storage_offset() - values.storage_offset()), width)
        if shape[-1] != width or remainder or not values.is_contiguous():
            raise LayoutError(f"the engine holds {name!r} quantized, not by rows")
        row = torch.arange(first, first + math.prod(shape[:-1]), device=values.device)
        scales = self._weights[scale].view(-1, self._weights[scale].shape[-1])
        grid_rows = scales.shape[0] // math.prod(leading)
        block = row // num_rows * grid_rows + row % num_rows // BLOCK
        return _Rows(destination, first, view, scales, block)


def dequantize(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write `values` times the scales of their blocks to `out`: float32 products, rounded once.

    values: float8 [..., K].
    scales: float32 [..., ceil(K / 128)].
    """
    out.copy_(values)  # exact
    full = values.shape[-1] // BLOCK
    if full:
        blocks = out[..., : full * BLOCK].unflatten(-1, (full, BLOCK))
        blocks.mul_(scales[..., :full, None])
    if full < scales.shape[-1]:
        out[..., full * BLOCK :].mul_(scales[..., full:])
