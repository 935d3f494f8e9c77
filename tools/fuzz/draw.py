"""Random arguments: right ones of every kind, and ways to spoil them."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
INTS = (0, 1, -1, 2, 3, 7, 255, -(2**31), 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, -1e38, math.inf, -math.inf, math.nan)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHORT_DTYPES = (torch.bfloat16, torch.float16)


class GuardedMemory:
    """Regions in turn, each between two pages that cannot be accessed."""

    SIZE, COUNT = 1 << 16, 256

    def __init__(self) -> None:
        page = mmap.PAGESIZE
        self._step = self.SIZE + page
        self._map = mmap.mmap(-1, self.COUNT * self._step + page)
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._next = 0
        libc = ctypes.CDLL(None, use_errno=True)
        for i in range(self.COUNT + 1):
            where = ctypes.c_void_p(self._first + i * self._step)
            if libc.mprotect(where, ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect failed")

    def holding(self, tensor: Tensor, at_end: bool) -> Tensor:
        """Return a contiguous copy at the begin or the end of a region, if it fits in one."""
        size = tensor.nbytes
        if not 0 < size <= self.SIZE:
            return tensor
        region = self._first + self._next % self.COUNT * self._step + mmap.PAGESIZE
        self._next += 1
        address = region + (self.SIZE - size if at_end else 0)
        memory = (ctypes.c_uint8 * size).from_address(address)
        copy = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)


class Draw:
    """What one call is made of, from its number."""

    memory = None if SANITIZED else GuardedMemory()

    def __init__(self, seed: int, number: int) -> None:
        self.random = random.Random(f"{seed}/{number}")
        self.torch = torch.Generator().manual_seed(self.random.getrandbits(62))

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def size(self, most: int = 20) -> int:
        """Return a size, often 0, 1 or next to that of a vector or a block."""
        if self.chance(0.4):
            return self.random.randint(0, most)
        return min(self.random.choice((0, 1, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65)), most)

    def pick(self, options: Any) -> Any:
        return self.random.choice(options)

    def maybe(self, make: Callable[[], Any]) -> Any:
        return make() if self.chance(0.5) else None

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.randn(shape, generator=self.torch) * self.pick((1.0, 1.0, 1e-3, 50.0, 1e4))
        if self.chance(0.2) and values.numel():
            at = self.random.randrange(values.numel())
            values.view(-1)[at] = self.pick(FLOATS)
        return values.to(dtype)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.torch).to(dtype)

    def bools(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.torch) < self.pick((0.0, 0.3, 0.7, 1.0))

    def ends(self, count: int, total: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return [count + 1] ascending numbers from 0 to total."""
        cuts = sorted(self.random.randint(0, total) for _ in range(count - 1))
        return torch.tensor([0, *cuts, total][: count + 1], dtype=dtype)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the same values with a row stride that is larger, now and then."""
        if tensor.dim() < 2 or self.chance(0.7):
            return tensor
        wide = torch.cat([tensor, tensor[..., :3]], -1)
        return wide[..., : tensor.shape[-1]]

    # Wrong arguments

    def spoilt(self, value: Any) -> Any:
        """Return a value of about the same type that may be wrong."""
        if isinstance(value, Tensor):
            return self._spoilt_tensor(value)
        if isinstance(value, bool):
            return self.pick((not value, 2, None, "x"))
        if isinstance(value, int):
            return self.pick((*INTS, value + 1, value - 1, None, 1.5))
        if isinstance(value, float):
            return self.pick((*FLOATS, None, "x"))
        if isinstance(value, list | tuple):
            return self._spoilt_list(list(value))
        return self.pick((None, 0, -1, "x", torch.zeros(3), torch.float64))

    def _spoilt_list(self, values: list) -> list:
        values, way = list(values), self.random.randrange(5)
        if way == 0 or not values:
            values.append(self.pick((0, 1.0, None, torch.zeros(2))))
        elif way == 1:
            values.pop()
        elif way == 2:
            values.append(values[0])
        elif way == 3:
            return []
        else:
            i = self.random.randrange(len(values))
            values[i] = self.spoilt(values[i])
        return values

    def _spoilt_tensor(self, tensor: Tensor) -> Any:
        if tensor.layout != torch.strided or tensor.is_meta:  # it is spoilt already
            return None
        flat = tensor.reshape(-1)
        ways: list[Callable[[], Any]] = [
            lambda: None,
            lambda: tensor.to(self.pick(DTYPES)),
            lambda: tensor[:-1] if tensor.dim() and len(tensor) else tensor.new_zeros(2),
            lambda: torch.cat([flat, flat[:1]]),
            lambda: tensor.unsqueeze(self.pick((0, -1))),
            lambda: tensor.new_zeros(()),
            lambda: tensor.new_zeros((0, *tensor.shape[1:])),
            lambda: tensor.new_zeros(64).as_strided((0,), (1,)),  # no element, but a storage
            lambda: flat.repeat(2)[::2],
            lambda: tensor.mT if tensor.dim() > 1 else flat[1:],
            lambda: tensor[:1].expand(tensor.shape) if tensor.dim() and len(tensor) else tensor,
            lambda: torch.cat([flat[:1], flat])[1:].view(tensor.shape),  # not aligned
            lambda: torch.empty_like(tensor, device="meta"),
            lambda: tensor.reshape(-1, 1),
            lambda: tensor.to_sparse() if tensor.dtype == torch.float32 else tensor,
        ]
        changes_values: list[Callable[[], Any]] = [lambda: self._other_values(tensor)] * len(ways)
        return self.pick(ways + changes_values)()

    def _other_values(self, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
        for _ in range(self.random.randint(1, 3)):
            if flat.numel():
                at = self.random.randrange(flat.numel())
                if tensor.dtype.is_floating_point:
                    flat[at] = self.pick(FLOATS)
                elif tensor.dtype in (torch.int64, torch.int32):
                    bits = torch.iinfo(tensor.dtype)
                    near = int(flat[at]) + self.pick((-1, 1, 5))
                    value = self.pick((*INTS, near, len(flat), 64, 100))
                    flat[at] = min(max(value, bits.min), bits.max)
                elif tensor.dtype == torch.bool:
                    flat[at] = not flat[at]
                else:
                    flat[at] = self.random.randint(0, 100)
        return flat.view(tensor.shape)

    def placed(self, value: Any) -> Any:
        """Return the arguments with every second tensor in guarded memory."""
        if isinstance(value, list | tuple):
            return [self.placed(x) for x in value]
        if self.memory is None or not isinstance(value, Tensor) or not value.is_cpu:
            return value
        if value.layout == torch.strided and value.is_contiguous() and self.chance(0.5):
            return self.memory.holding(value, self.chance(0.7))
        return value
