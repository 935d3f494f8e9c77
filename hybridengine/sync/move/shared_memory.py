"""Memory of a rank that others of its machine can read.

Host memory is a memfd, which the other ranks open through /proc: it has no name and no size limit
of a file system, and is freed with the last process that maps it, however that process ends. Device
memory is PyTorch's symmetric memory, which the other GPUs read over NVLink or PCIe.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybridengine.run.all_ranks import all_gather_values
from hybridengine.run.failures import one_line


@dataclass(frozen=True)
class SharedMemory:
    """Memory of all ranks, mapped as long as this object lives.

    buffers: the memory of each rank, uint8 [size].
    """

    buffers: list[torch.Tensor]
    _owner: object


class _HostMemory:
    """Memory of the host; `address` is the path by which ranks of this machine open it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._descriptor = os.memfd_create("hybridengine")
        os.ftruncate(self._descriptor, size)
        self.address = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def map(self, addresses: Sequence[str]) -> list[torch.Tensor]:
        return [
            torch.from_file(path, shared=True, size=self._size, dtype=torch.uint8)
            for path in addresses
        ]

    def close(self) -> None:
        """Forget the descriptor; what is mapped stays."""
        os.close(self._descriptor)


class _DeviceMemory:
    """Memory of a GPU; `address` is the index of this rank's GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        # Not symm_mem.empty: tensors of its memory pool may start inside an allocation.
        self._tensor = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        self._size, self.address = size, device.index

    def map(self, addresses: Sequence[int]) -> list[torch.Tensor]:
        from torch.distributed._symmetric_memory import rendezvous

        group = dist.group.WORLD
        assert group is not None
        self._handle = rendezvous(self._tensor, group.group_name)
        ranks = range(len(addresses))
        return [self._handle.get_buffer(r, (self._size,), torch.uint8) for r in ranks]

    def close(self) -> None: ...


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
        host = _HostMemory(size, device)
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


def share_memory(size: int, device: torch.device) -> SharedMemory | None:
    """Return `size` bytes of every rank, or None if not every rank can map all. Collective.

    size, device.type: the same on every rank. All ranks are on one machine. Warns where sharing
    failed, but not of GPUs that cannot access each other.
    """
    own: _HostMemory | _DeviceMemory | None = None
    buffers: list[torch.Tensor] = []
    problem: str | None = None
    try:
        own = (_HostMemory if device.type == "cpu" else _DeviceMemory)(size, device)
    except Exception as error:
        problem = one_line(error)
    offer = (own and own.address, problem)
    offers = all_gather_values(offer, tuple[str | int | None, str | None])
    addresses: list[Any] = [address for address, _ in offers]
    problems = [text for _, text in offers]
    if device.type == "cuda" and not _access_each_other(addresses):
        return None
    if own is not None:
        if not any(problems):
            try:
                buffers = own.map(addresses)
            except Exception as error:
                problem = one_line(error)
            problems = all_gather_values(problem, str | None)  # from here on every rank has mapped
        own.close()
    if failed := [rank for rank, text in enumerate(problems) if text]:
        if dist.get_rank() == 0:
            warnings.warn(
                f"rank {failed[0]} cannot share memory with the other ranks of this machine "
                f"({problems[failed[0]]}): weight syncs use the slower all-to-all",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
    return SharedMemory(buffers, own)


def _access_each_other(gpus: Sequence[int | None]) -> bool:
    """Return whether each of the GPUs can read the memory of all others."""
    found = {gpu for gpu in gpus if gpu is not None}
    return all(torch.cuda.can_device_access_peer(a, b) for a in found for b in found - {a})
