"""The memory of one rank: what it has at its peak, and what it may have."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from hybridengine.run.host_memory import free_memory

_SHARE = 0.9  # of the memory: lengths of later steps and fragments need the rest
_OWN = Path("/proc/self")


class PeakMemory:
    """Peaks of this rank, on its GPU or in its host's memory.

    num_local: ranks that share the host's memory.

    Attributes:
        allowed: bytes that this rank may have at its peak: 0.9 of what it has and what is free,
          without what the engine keeps on the same GPU while it sleeps.
    """

    def __init__(self, device: torch.device, num_local: int) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            free, total = torch.cuda.mem_get_info(device)
            self.allowed = _SHARE * total - (total - free - torch.cuda.memory_reserved(device))
        else:
            self.allowed = psutil.Process().memory_info().rss + _SHARE * free_memory() / num_local

    def restart(self) -> None:
        """Forget the peaks until now."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            (_OWN / "clear_refs").write_text("5")  # proc(5): resets the peak of the resident set

    @property
    def peak(self) -> float:
        """Bytes at the peak since `restart`."""
        if self._cuda:
            return float(torch.cuda.max_memory_reserved())
        lines = (_OWN / "status").read_text().splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
