"""Multiply a gradient in place by a factor that only the device knows, and that is mostly 1."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import ceil_div, launch

BLOCK_SIZE = 4096
_PROGRAMS_PER_SM = 4


@triton.jit
def rescale_kernel(values, factor, size, BLOCK: tl.constexpr):
    """values [size] *= factor [1]; neither read nor written if factor is 1."""
    scale = tl.load(factor)
    if scale != 1.0:
        begin = tl.program_id(0).to(tl.int64) * BLOCK
        while begin < size:
            offsets = begin + tl.arange(0, BLOCK)
            value = tl.load(values + offsets, mask=offsets < size).to(tl.float32) * scale
            tl.store(values + offsets, value.to(values.dtype.element_ty), mask=offsets < size)
            begin += tl.num_programs(0).to(tl.int64) * BLOCK


def rescale_(tensor: Tensor, factor: Tensor) -> Tensor:
    """Multiply a contiguous tensor in place by `factor`, float32, of one element."""
    programs = 2  # in the interpreter
    if tensor.is_cuda:
        device = torch.cuda.get_device_properties(tensor.device)
        programs = _PROGRAMS_PER_SM * device.multi_processor_count
    programs = min(programs, ceil_div(tensor.numel(), BLOCK_SIZE))
    if programs:
        launch(
            rescale_kernel,
            (programs,),
            tensor,
            factor,
            tensor.numel(),
            BLOCK=BLOCK_SIZE,
            num_warps=8,
        )
    return tensor
