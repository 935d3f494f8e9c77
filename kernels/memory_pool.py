"""The cached memory pool of the C++ kernels (csrc/common/memory_pool.h)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._backend import native


def empty_from_pool(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Allocate an uninitialized tensor, a large one on a CPU from the memory of earlier ones.

    The system clears new pages one by one, which costs several times what filling them does.
    Elsewhere, and without the extension, this is `torch.empty`.

    Examples:
        >>> empty_from_pool([2, 3], torch.float32).shape
        torch.Size([2, 3])
    """
    traced = torch._C._len_torch_dispatch_stack()  # FakeTensorMode and others make it themselves
    if torch.device(device).type == "cpu" and native() is not None and not traced:
        return native().empty_from_pool(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)
