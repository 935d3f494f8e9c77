"""Pages of a KV cache in host memory."""

from __future__ import annotations

import ctypes
import mmap

import torch

# Return the memory to the system: addresses stay valid, pages that are used again are allocated
# again and are zero. Locked memory cannot be returned and stays as it is.
DONTNEED = mmap.MADV_DONTNEED
# Allocate 2 MiB at a time from now on. Reading a cache block by block misses the TLB otherwise.
HUGEPAGE = mmap.MADV_HUGEPAGE


def advise_pages(storage: torch.UntypedStorage, advice: int) -> None:
    """Call madvise for the whole pages of a CPU storage; a system that refuses changes nothing."""
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    if begin < end:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
