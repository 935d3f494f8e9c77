"""Sleep of a vLLM engine on a GPU: weights that the next sync writes are not kept.

vLLM's sleep level 1 copies all weights to host memory and back at every step, although the sync in
between overwrites them. Level 2 discards them, and keeps the model's buffers only. Here level 2 is
used, and every allocation in the memory of the weights that a sync does not write in full (buffers,
weights that vLLM derived, LoRA slots, a draft model, plain attributes) is copied to the host.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch


class Allocation(NamedTuple):
    """Bytes of the device's memory."""

    address: int
    nbytes: int


class Level2Sleep:
    """Puts `llm` to sleep and wakes it up again.

    llm: a `vllm.LLM` in this process with sleep mode.
    allocator: vLLM's `CuMemAllocator`.
    copy: of (destination address, source address, bytes) between device and host, in either
      direction.
    """

    def __init__(self, llm: Any, allocator: Any, copy: Callable[[int, int, int], object]) -> None:
        self._llm, self._allocator, self._copy = llm, allocator, copy
        self._kept: list[tuple[Allocation, torch.Tensor]] = []

    @classmethod
    def of(cls, llm: Any) -> Level2Sleep | None:
        """Return it for an engine whose sleep is that of vLLM's own allocator, else None."""
        if llm.model_config.sleep_mode_backend != "cumem":
            return None
        from vllm.device_allocator import cumem

        allocator = cumem.CuMemAllocator.get_instance()
        return cls(llm, allocator, cumem.libcudart.cudaMemcpy)

    def sleep(self, written: Iterable[torch.Tensor]) -> None:
        """Free weights and KV cache. written: the tensors that the next sync writes in full."""
        pinned = torch.cuda.is_available()
        for allocation in unwritten(self._weight_allocations(), written):
            held = torch.empty(allocation.nbytes, dtype=torch.uint8, pin_memory=pinned)
            self._copy(held.data_ptr(), allocation.address, allocation.nbytes)
            self._kept.append((allocation, held))
        self._llm.sleep(level=2)

    def wake_weights(self) -> None:
        """Allocate the weights again, at the same addresses, with what was kept of them."""
        self._llm.wake_up(tags=["weights"])
        for allocation, held in self._kept:
            self._copy(allocation.address, held.data_ptr(), allocation.nbytes)
        self._kept.clear()

    def _weight_allocations(self) -> Iterator[Allocation]:
        """Yield the allocations in use in the memory pools of the weights."""
        for pool, _ in self._allocator.allocator_and_pools.get("weights", ()):
            for segment in pool.snapshot():
                address = segment["address"]
                for block in segment["blocks"]:
                    if block["state"] == "active_allocated":
                        yield Allocation(address, block["requested_size"])
                    address += block["size"]


def unwritten(
    allocations: Iterable[Allocation], written: Iterable[torch.Tensor]
) -> list[Allocation]:
    """Return the allocations that the tensors in `written` do not cover from end to end.

    A tensor with gaps between its elements covers nothing.
    """
    starts: list[int] = []
    ends: list[int] = []
    for tensor in sorted(filter(_is_dense, written), key=torch.Tensor.data_ptr):
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)

    def is_covered(allocation: Allocation) -> bool:
        i = bisect_right(starts, allocation.address) - 1
        return i >= 0 and allocation.address + allocation.nbytes <= ends[i]

    return [allocation for allocation in allocations if not is_covered(allocation)]


def _is_dense(tensor: torch.Tensor) -> bool:
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return reach + 1 == tensor.numel()
