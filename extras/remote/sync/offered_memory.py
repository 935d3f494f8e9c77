"""Memory of a rank that other processes of its machine can map: a path, or a GPU's handle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hybridengine.sync.transport import HostMemory

_IpcHandle = tuple[bytes, int, int, bytes, int, bytes, bool]


class MemoryOffer(NamedTuple):
    """What another process needs to map `size` bytes: a path, or the handle of a GPU's memory."""

    size: int
    path: str
    handle: _IpcHandle | None


@contextmanager
def offered_memory(size: int, device: torch.device) -> Iterator[tuple[torch.Tensor, MemoryOffer]]:
    """Yield new memory, uint8 [size], and what other processes need to map it while this is open.

    They must be on the same device. It stays mapped afterwards.
    """
    if device.type == "cpu":
        host = HostMemory(size, device)
        [tensor] = host.map([host.address])
        try:
            yield tensor, MemoryOffer(size, host.address, None)
        finally:
            host.close()
        return
    with _without_expandable_segments():  # whose memory has no handle
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
    _, *handle = tensor.untyped_storage()._share_cuda_()
    yield tensor, MemoryOffer(size, "", tuple(handle))


def map_memory(offer: MemoryOffer, device: torch.device) -> torch.Tensor:
    """Return the offered memory, uint8 [size]. device: the same as that of its owner."""
    if offer.handle is None:
        return torch.from_file(offer.path, shared=True, size=offer.size, dtype=torch.uint8)
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *offer.handle)
    tensor = torch.empty(0, dtype=torch.uint8, device=device)
    return tensor.set_(storage, 0, (offer.size,), (1,))


@contextmanager
def _without_expandable_segments() -> Iterator[None]:
    configured = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    configured += os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:True" not in configured:
        yield
        return
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
