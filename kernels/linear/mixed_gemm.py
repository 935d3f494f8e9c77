"""Matrix products of 16-bit operands with a float32 result that was never rounded to 16 bits.

On a GPU this is the vendor library's own product with an output type; on a CPU oneDNN's 16-bit
kernel where the machine has it (csrc/linear). Elsewhere 16-bit products would run at a fifth to a
thirtieth of the float32 rate: operands are converted to float32 block by block instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._backend import native

# Most that a block of an operand takes once it is converted to float32: it is still in the cache
# when the product reads it.
WIDENED_BYTES = 2**22


def has_fast_products(dtype: torch.dtype, device: torch.device | str = "cpu") -> bool:
    """Whether matrix products in `dtype` run at least at the float32 rate on `device`.

    On a CPU that takes AVX512-BF16 for bfloat16 (which every CPU with AMX has) and AVX512-FP16 for
    float16; `HYBRIDENGINE_ISA` and `ONEDNN_MAX_CPU_ISA` are respected. On a GPU it takes an Ampere
    or later one for bfloat16.

    Example:
        >>> has_fast_products(torch.float32)
        True
    """
    if dtype.itemsize != 2:
        return True
    if torch.device(device).type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    return native() is not None and native().has_mixed_product(dtype)


def keeps_16_bits(like: Tensor) -> bool:
    """Whether products of operands of this dtype and device are taken as they are."""
    return like.is_cuda or has_fast_products(like.dtype, like.device)


def mixed_product(
    out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, accumulate: bool = False
) -> None:
    """out [m, n] = a [m, k] @ b [n, k].T + bias [n], or out += a @ b.T with `accumulate`.

    `out` is float32 where a or b is 16-bit, of their dtype where they are not. Each of a and b has
    stride 1 along one dimension.
    """
    if a.dtype == b.dtype == out.dtype:
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
    elif a.dtype == b.dtype and has_fast_products(a.dtype, a.device):
        native().mixed_product(a, b, None if bias is None else bias.float(), out, accumulate)
    else:
        if bias is not None:
            out.copy_(bias.expand_as(out))
        _widened(out, a, b, accumulate or bias is not None)


def _widened(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """The product in float32: the larger 16-bit operand is converted in blocks, along the dimension
    in which they are contiguous, the other one as a whole."""
    wide = out.dtype
    if b.dtype == wide or (a.dtype != wide and a.numel() > b.numel()):
        out, a, b = out.t(), b, a
    a = a.to(wide)
    along = int(b.stride(0) < b.stride(1))  # 0: rows of b, that is columns of out; 1: the sum
    count, width = b.shape[along], b.shape[1 - along]
    step = max(1, WIDENED_BYTES // (wide.itemsize * max(1, width)))
    for begin in range(0, max(1, count), step):
        part = slice(begin, begin + step)
        if along:
            block = b[:, part].to(wide)
            mixed_product(out, a[:, part], block, accumulate=accumulate or begin > 0)
        else:
            mixed_product(out[:, part], a, b[part].to(wide), accumulate=accumulate)
