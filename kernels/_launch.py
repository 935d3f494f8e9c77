"""launch: run a Triton kernel on the device of its tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch `kernel[grid]` on the device of the first tensor of `arguments`.

    Triton itself launches on the current device, which need not be that of the tensors.
    """
    device = next(value.device for value in arguments if isinstance(value, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options)
