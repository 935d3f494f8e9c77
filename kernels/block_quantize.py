"""block_quantize: weights as float8_e4m3fn with one float32 scale per block of 128 x 128.

Bit-equal to what vLLM computes as it loads a model with `quantization="fp8_per_block"`
(`vllm.utils.deep_gemm.per_block_cast_to_fp8`); only the sign of a NaN may differ. Of a block:

    scale = max(largest magnitude, 1e-4) / 448
    quantized = e4m3(value * (1 / scale))        rounded to nearest even

in float32. Blocks at the edges of a matrix are smaller. A block with NaN or infinity has that scale
and holds no number but zero.

`BlockTable` does the same for blocks that are spread over several tensors and ranks: find the
largest magnitude of the slices that are here, combine them, quantize the slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from . import _check as check
from ._backend import choose_backend, native, register_backends
from ._library import custom_op

register_backends("block_quantize", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

BLOCK = 128
QUANTIZED_DTYPE = torch.float8_e4m3fn
_OP = "block_quantize"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def block_quantize(weight: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Quantize matrices in blocks of 128 x 128.

    Args:
        weight: [..., N, K], bfloat16, float16 or float32.
        backend: `cpp`, `cuda` or `reference`; None takes the best one.

    Returns:
        (float8_e4m3fn [..., N, K], scales float32 [..., ceil(N / 128), ceil(K / 128)]), contiguous.
        The value of an element is about the product of the two.

    Raises:
        ValueError: fewer than two dimensions, or another dtype.

    Examples:
        >>> quantized, scale = block_quantize(torch.full((2, 200), 7.0))
        >>> quantized[0, 0].item(), scale.shape
        (448.0, torch.Size([1, 2]))
    """
    check.dtype(_OP, "weight", weight, _DTYPES)
    if weight.dim() < 2:
        raise ValueError(
            f"{_OP}: weight has shape {list(weight.shape)}; expected at least two dimensions."
        )
    quantized, scale = _block_quantize(weight, backend)
    return quantized, scale


def block_grid(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor [..., N, K]."""
    return (*shape[:-2], *(-(-n // BLOCK) for n in shape[-2:]))


def block_scales(absmax: Tensor) -> Tensor:
    """Return the scales of blocks, float32.

    absmax: largest magnitudes, as the int32 bits of float32: their order is that of the magnitudes,
    with NaN last, so any integer maximum combines them.
    """
    largest = absmax.view(torch.float32).clamp(1e-4)
    return largest / torch.finfo(QUANTIZED_DTYPE).max  # as vLLM writes it: CUDA divides otherwise


class BlockTable:
    """Slices that each lie in one block, for repeated use; checked and uploaded once.

    table: the slices [P, 16], as for `strided_copy` (see there for the columns), of at most 16384
      elements each.
    blocks: int64 [P], the number of the block that each lies in.
    device: the device of the tensors.
    Raises IndexError and ValueError as `strided_copy`.
    """

    def __init__(self, table: Tensor, blocks: Tensor, device: torch.device) -> None:
        self._rows = len(table)
        self._absmax: Callable
        self._quantize: Callable
        if choose_backend(_OP, device) == "reference":
            self._absmax = partial(_reference_absmax, table, blocks)
            self._quantize = partial(_reference_quantize, table, blocks)
        else:
            native_table = native().CopyTable(table, blocks)
            self._absmax, self._quantize = native_table.absmax, native_table.quantize

    def __len__(self) -> int:
        return self._rows

    def absmax(self, sources: Sequence[Tensor], absmax: Tensor, dtype: torch.dtype) -> None:
        """Raise `absmax` (int32 [B], see `block_scales`) to the largest magnitudes of the slices.

        sources: bfloat16, float16 or float32.
        dtype: the dtype to which values are rounded first.
        """
        if self._rows:
            self._absmax(sources, absmax, dtype)

    def quantize(
        self,
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        scale: Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Write the quantized slices. destinations: float8_e4m3fn. scale: float32 [B]."""
        if self._rows:
            self._quantize(sources, destinations, scale, dtype)


def quantize_values(values: Tensor, scale: Tensor) -> Tensor:
    """Return values of the engine's dtype as float8_e4m3fn. scale: float32, of `values`' shape."""
    return (values * (1.0 / scale)).to(QUANTIZED_DTYPE)


@custom_op("hybridengine::block_quantize", mutates_args=())
def _block_quantize(weight: Tensor, backend: str | None) -> tuple[Tensor, Tensor]:
    reference = choose_backend(_OP, weight.device, backend) == "reference"
    weight = weight.contiguous()
    quantized, scale = _reference(weight) if reference else native().block_quantize(weight)
    return quantized, scale


@_block_quantize.register_fake
def _(weight: Tensor) -> tuple[Tensor, Tensor]:
    quantized = weight.new_empty(weight.shape, dtype=QUANTIZED_DTYPE)
    return quantized, weight.new_empty(block_grid(weight.shape), dtype=torch.float32)


def _reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pad to full blocks: the specification."""
    *_, n, k = weight.shape
    rows, columns = block_grid((n, k))
    if not weight.numel():
        return weight.to(QUANTIZED_DTYPE), weight.new_empty(block_grid(weight.shape)).float()
    padded = torch.nn.functional.pad(weight, (0, columns * BLOCK - k, 0, rows * BLOCK - n))
    tiles = padded.reshape(-1, rows, BLOCK, columns, BLOCK)
    largest = tiles.abs().float().amax(dim=(2, 4))
    scale = block_scales(largest.view(torch.int32))
    expanded = scale[:, :, None, :, None].expand(tiles.shape)
    quantized = quantize_values(tiles, expanded).reshape(padded.shape)[..., :n, :k]
    return quantized.contiguous(), scale.view(block_grid(weight.shape))


def _slices(
    table: Tensor, blocks: Tensor, tensors: Sequence[Tensor], destination: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield (block, view) of every slice, of one side."""
    for row, block in zip(table.tolist(), blocks.tolist(), strict=True):
        tensor, start = tensors[row[destination]], row[2 + destination]
        stride = row[12:16] if destination else row[8:12]
        yield block, tensor.as_strided(row[4:8], stride, tensor.storage_offset() + start)


def _reference_absmax(
    table: Tensor, blocks: Tensor, sources: Sequence[Tensor], absmax: Tensor, dtype: torch.dtype
) -> None:
    for block, source in _slices(table, blocks, sources, False):
        if source.numel():
            largest = source.to(dtype).float().abs().amax().view(torch.int32)
            absmax[block] = torch.maximum(absmax[block], largest)


def _reference_quantize(
    table: Tensor,
    blocks: Tensor,
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    scale: Tensor,
    dtype: torch.dtype,
) -> None:
    sides = (_slices(table, blocks, sources, False), _slices(table, blocks, destinations, True))
    for (block, source), (_, destination) in zip(*sides, strict=True):
        destination.copy_(quantize_values(source.to(dtype), scale[block].expand(source.shape)))
