"""Tiles of the Triton kernels of tree_attention, by GPU, head size, dtype and options.

Chosen so that the kernels, compiled by Triton 3.6 and 3.9, spill no registers and, before compute
capability 9.0, fit the 99 KiB of shared memory of the smaller GPUs (`make cuda-check` shows both);
not yet tuned by measurements. Hopper's products read operands from shared memory, whose bandwidth
suffices from 128 keys on (wgmma with n = 128); a window or soft-cap needs registers, hence smaller
tiles.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._launch import next_power_of_2

MAX_HEAD_SIZE = 256  # of the kernels


class Inputs(NamedTuple):
    """What the kernels read of heads. Tensors come with their strides of a token and a head."""

    query: Any
    key: Any  # None in a paged cache
    value: Any
    grad_out: Any  # None in a forward
    group: Any  # query heads of a key-value head
    width: Any
    value_width: Any
    scale: Any
    factor: Any  # of scores in base 2
    cap_scale: Any  # see `scores_of`


class Form(NamedTuple):
    """The constants of a kernel."""

    HAS_WINDOW: bool
    HAS_CAP: bool
    ALL_COLUMNS: bool  # the head sizes are BLOCK_D and BLOCK_V
    BLOCK_D: int
    BLOCK_V: int
    BLOCK_M: int = 0
    BLOCK_N: int = 0


class Tiles(NamedTuple):
    """Queries and keys of a block; warps of a program; loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """The options of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# By kernel and compute capability (0: float32 inputs): head sizes up to 64, 128 and 256.
_TILES = {
    ("forward", 80): (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2)),
    ("forward", 90): (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 32, 8, 2)),
    ("forward", 100): (Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2)),
    ("forward", 0): (Tiles(32, 32, 8, 2), Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1)),
    ("query_grad", 80): (Tiles(128, 32, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 1)),
    ("query_grad", 90): (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(64, 16, 8, 2)),
    ("query_grad", 100): (Tiles(128, 32, 4, 2), Tiles(128, 32, 8, 2), Tiles(32, 32, 8, 2)),
    ("query_grad", 0): (Tiles(16, 16, 8, 1), Tiles(32, 16, 8, 1), Tiles(32, 16, 4, 1)),
    ("key_grad", 80): (Tiles(32, 128, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 32, 8, 2)),
    ("key_grad", 90): (Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 2), Tiles(32, 32, 8, 2)),
    ("key_grad", 100): (Tiles(64, 64, 8, 2), Tiles(32, 128, 8, 2), Tiles(32, 32, 8, 2)),
    ("key_grad", 0): (Tiles(32, 32, 8, 2), Tiles(16, 32, 8, 2), Tiles(16, 32, 8, 1)),
}
# Without a window and a soft-cap: by kernel, compute capability and padded head size.
_PLAIN_TILES = {
    ("forward", 80, 64): Tiles(128, 64, 8, 3),
    ("forward", 80, 128): Tiles(128, 64, 8, 2),
    ("forward", 90, 64): Tiles(128, 64, 4, 2),
    ("forward", 90, 128): Tiles(128, 128, 8, 2),
    ("forward", 90, 256): Tiles(128, 32, 8, 2),
    ("forward", 100, 128): Tiles(128, 64, 8, 3),
    ("query_grad", 90, 256): Tiles(64, 32, 8, 2),
    ("query_grad", 100, 64): Tiles(128, 32, 8, 2),
    ("key_grad", 100, 64): Tiles(64, 128, 8, 2),
    ("key_grad", 100, 128): Tiles(64, 128, 8, 2),
}


def choose_tiles(kernel: str, head_size: int, itemsize: int, capability: int, plain: bool) -> Tiles:
    """Return the tiles of a kernel: `forward`, `query_grad` or `key_grad`.

    head_size: the larger one of D and D_v; capability such as 90; plain: no window, no soft-cap.
    """
    column = 0 if head_size <= 64 else 1 if head_size <= 128 else 2
    generation = 0 if itemsize == 4 else 80 if capability < 90 else min(capability // 10 * 10, 100)
    tiles = _TILES[kernel, generation][column]
    return _PLAIN_TILES.get((kernel, generation, 64 << column), tiles) if plain else tiles


def capability_of(x: Tensor) -> int:
    """Return the compute capability of the GPU of x, such as 90; 90 in the interpreter."""
    if not x.is_cuda:
        return 90
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


def block_sizes(width: int, value_width: int) -> tuple[int, int]:
    """Return BLOCK_D and BLOCK_V of head sizes."""
    block_d, block_v = (max(16, next_power_of_2(n)) for n in (width, value_width))
    return block_d, block_v


def form_of(
    width: int, value_width: int, window_size: int | None, softcap: float | None, tiles: Tiles
) -> Form:
    blocks = block_sizes(width, value_width)
    flags = (window_size is not None, softcap is not None, blocks == (width, value_width))
    return Form(*flags, *blocks, *tiles[:2])


def strided(x: Tensor) -> tuple[Any, ...]:
    """Return x [T, heads, ...] of inner stride 1, copied if needed, with its other strides."""
    x = x if x.stride(2) == 1 else x.contiguous()
    return (x, *x.stride()[:2])


def scale_arguments(
    query: Tensor, softmax_scale: float, softcap: float | None
) -> tuple[Tensor, dict[str, float]]:
    """Return the query, with the sign of the scale, and `factor` and `cap_scale` of Inputs.

    The kernels take the maximum of the scores before they scale, which is therefore positive.
    """
    if softmax_scale <= 0:
        query = query * (-1.0 if softmax_scale < 0 else 0.0)
        softmax_scale = -softmax_scale or 1.0
    factor = softmax_scale if softcap is None else softcap
    cap_scale = 0.0 if softcap is None else 2 * softmax_scale / softcap / math.log(2)
    return query, {"factor": factor / math.log(2), "cap_scale": cap_scale}
