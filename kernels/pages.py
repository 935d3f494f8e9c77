"""Pages of tensors in host memory: given back to the system, or requested as huge pages."""

from __future__ import annotations

import ctypes
import mmap

import torch

# Return the memory to the system: addresses stay valid, pages that are used again are allocated
# again and are zero. Locked memory cannot be returned and stays as it is.
DONTNEED = mmap.MADV_DONTNEED
# Allocate 2 MiB at a time from now on: else reading weights, or a cache block by block, misses the
# TLB.
HUGEPAGE = mmap.MADV_HUGEPAGE
_HUGE_PAGE_BYTES = 2 << 20


def advise_pages(storage: torch.UntypedStorage, *advice: int) -> None:
    """Call madvise for the whole pages of a CPU storage; a system that refuses changes nothing."""
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    for one in advice:
        _advise(begin, end, one)


def prefer_huge_pages(storage: torch.UntypedStorage) -> None:
    """Request huge pages for a storage, with those that it shares; nothing off the CPU."""
    if storage.device.type == "cpu":
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        _advise(begin - begin % _HUGE_PAGE_BYTES, end + -end % _HUGE_PAGE_BYTES, HUGEPAGE)


def _advise(begin: int, end: int, advice: int) -> None:
    if begin < end:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
