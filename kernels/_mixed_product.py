"""Matrix products of 16-bit operands with a float32 result that was never rounded to 16 bits.

On a GPU this is the vendor library's own product with an output type; on a CPU oneDNN's 16-bit
kernel where the machine has it (csrc/linear), else the operands are widened block by block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._backend import native

# Most that a widened block of the larger operand takes.
WIDENED_BYTES = 2**24


def mixed_product(
    out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, accumulate: bool = False
) -> None:
    """out [m, n] = a [m, k] @ b [n, k].T + bias [n], or out += a @ b.T with `accumulate`.

    `out` is float32 where a and b are 16-bit, of their dtype where they are not.
    """
    if a.dtype == out.dtype:
        if accumulate:
            out.addmm_(a, b.t())
        elif bias is None:
            torch.mm(a, b.t(), out=out)
        else:
            torch.addmm(bias, a, b.t(), out=out)
    elif a.is_cuda and accumulate:
        torch.ops.aten.addmm.dtype_out(out, a, b.t(), out.dtype, out=out)
    elif a.is_cuda:
        torch.ops.aten.mm.dtype_out(a, b.t(), out.dtype, out=out)
        if bias is not None:
            out += bias
    elif native() is not None and native().has_mixed_product(a):
        native().mixed_product(a, b, None if bias is None else bias.float(), out, accumulate)
    else:
        _widened(out, a, b, bias, accumulate)


def _widened(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, accumulate: bool) -> None:
    if bias is None and a.shape[0] > b.shape[0]:
        out, a, b = out.t(), b, a  # so that the larger operand is the one taken in blocks
    wide = a.to(out.dtype)
    step = max(1, WIDENED_BYTES // (out.dtype.itemsize * max(1, a.shape[1])))
    for begin in range(0, b.shape[0], step):
        part = slice(begin, begin + step)
        part_bias = None if bias is None else bias[part].to(out.dtype)
        mixed_product(out[:, part], wide, b[part].to(out.dtype), part_bias, accumulate)
