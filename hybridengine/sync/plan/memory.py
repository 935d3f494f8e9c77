"""How much memory a sync may take for its staging buffers."""

from __future__ import annotations

import torch

_MIN_BYTES, _MAX_BYTES = 64 << 20, 1 << 30
_SHARE_OF_FREE = 16  # two buffers are in use, so an eighth of the free memory in all


def default_bucket_bytes(device: torch.device) -> int:
    """Return the staging memory of one all-to-all, in bytes, that suits `device` now.

    On a CPU 64 MiB, which stays near the caches. On a GPU a bucket has a fixed cost on the host, so
    that larger ones are faster: a sixteenth of the free memory, at most 1 GiB.
    """
    if device.type != "cuda":
        return _MIN_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return bucket_bytes_of(free + cached)


def bucket_bytes_of(free: int) -> int:
    """Return the default bucket of a GPU with `free` bytes.

    Examples:
        >>> [bucket_bytes_of(gib << 30) >> 20 for gib in (0, 8, 100)]
        [64, 512, 1024]
    """
    return min(max(free // _SHARE_OF_FREE, _MIN_BYTES), _MAX_BYTES)
