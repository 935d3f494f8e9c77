"""Whether a delta can take less time than a dense sync on GPUs: by measured rates.

A dense sync waits for the link: each rank receives what its engine needs and it does not hold. A
delta sends little, but it has to know that nothing else was written: it reads every shard three
times (before and after an update, and at the sync) and every engine tensor twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybridengine.kernels import bit_checksum
from hybridengine.runtime.all_ranks import all_gather_values

_SHARD_READS, _ENGINE_READS = 3, 2
_LINK_BYTES = 32 << 20  # that a rank receives for a measurement
_MEMORY_BYTES = 256 << 20  # larger than caches
_REPEATS = 3


class Rates(NamedTuple):
    """Bytes per second of the slowest rank. link: received from others. memory: checksummed."""

    link: float
    memory: float


def measure(device: torch.device) -> Rates:
    """Measure the rates of the default process group's ranks. Collective."""
    world_size = dist.get_world_size()
    part = _LINK_BYTES // world_size
    sent, received = torch.zeros(2, part * world_size, dtype=torch.uint8, device=device).unbind()
    data = torch.zeros(_MEMORY_BYTES, dtype=torch.uint8, device=device)
    link_s = _seconds(lambda: dist.all_to_all_single(received, sent), device)
    memory_s = _seconds(lambda: bit_checksum(data), device)
    times = all_gather_values((link_s, memory_s), tuple[float, float])
    slowest = max(link for link, _ in times), max(memory for _, memory in times)
    return Rates(part * (world_size - 1) / slowest[0], _MEMORY_BYTES / slowest[1])


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of a call, after one that is not measured."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    times = []
    for _ in range(1 + _REPEATS):
        wait()
        started = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def delta_pays(
    received: Sequence[int], shards: Sequence[int], engines: Sequence[int], rates: Rates
) -> bool:
    """Return whether the reads of a delta take less time than what a dense sync receives.

    received, shards, engines: bytes that each rank receives densely, and that it holds.
    """
    reads = (
        _SHARD_READS * shard + _ENGINE_READS * engine
        for shard, engine in zip(shards, engines, strict=True)
    )
    return max(reads) / rates.memory < max(received) / rates.link
