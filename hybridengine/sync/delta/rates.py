"""Up to which share of changed elements a delta takes less time than a dense sync: by measurement.

Between ranks of one machine. A dense sync casts what is sent, and each rank receives what its
engine needs and it does not hold. A delta reads each shard and the copy of what was sent, and the
engine's tensors, which may have been written to; each change then costs about as much time as a
part of the memory that an engine's rank reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybridengine.kernels import bit_checksum
from hybridengine.run.all_ranks import all_gather_values

# Of a change, from finding to writing it: the bytes that are read in that time (docs/reshard.md).
_CHANGE_BYTES = 500
_BYTES = 32 << 20  # of an engine, for a measurement: larger than its cache
_REPEATS = 3


class Rates(NamedTuple):
    """Bytes per second of the slowest rank, while all of them do the same.

    dense: received from others, what is sent cast first and what is received written to an engine.
    memory: read.
    """

    dense: float
    memory: float


def measure(device: torch.device, pulls: bool) -> Rates:
    """Measure the rates of the default process group's ranks. Collective.

    pulls: whether a rank reads what it receives from the memory of others, or by an all-to-all.
    """
    world_size = dist.get_world_size()
    size = _BYTES // 2 // world_size * world_size
    values = torch.ones(size, device=device)  # zeros: the system maps one page for all of them
    staged, received, engine = torch.ones(3, size, dtype=torch.bfloat16, device=device).unbind()

    def dense() -> None:
        staged.copy_(values)
        if not pulls:
            dist.all_to_all_single(received, staged)
        engine.copy_(staged if pulls else received)

    own = _seconds(dense, device), _seconds(lambda: bit_checksum(values), device)
    times = all_gather_values(own, tuple[float, float])
    dense_s, memory_s = (max(column) for column in zip(*times, strict=True))
    arrives = 1.0 if pulls or world_size == 1 else (world_size - 1) / world_size
    return Rates(engine.nbytes * arrives / dense_s, values.nbytes / memory_s)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the mean time of calls that all ranks begin at once, after one that is not measured.

    Not the shortest: ranks may share cores and memory.
    """
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    call()
    wait()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    wait()
    return (time.perf_counter() - started) / _REPEATS


def max_share(
    received: Sequence[int],
    compared: Sequence[int],
    engines: Sequence[int],
    device: torch.device,
    pulls: bool,
) -> float:
    """Return the share of changed elements up to which a delta takes less time; 0: none.

    Collective, with the same result on all ranks. An engine that is smaller than the measured
    transfer gives 0, because either kind of sync takes a few milliseconds.

    received: bytes that each rank receives in a dense sync.
    compared: bytes that a comparison reads on each rank.
    engines: bytes of each rank's engine, with 16 bits per element.
    """
    if max(engines) < _BYTES or not max(received):
        return 0.0
    return share_of(received, compared, engines, measure(device, pulls), 1 + (device.type != "cpu"))


def share_of(
    received: Sequence[int],
    compared: Sequence[int],
    engines: Sequence[int],
    rates: Rates,
    engine_reads: int,
) -> float:
    """Return the share at given rates. engine_reads: of its tensors, by a delta."""
    dense_s = max(received) / rates.dense
    reads = (c + engine_reads * e for c, e in zip_longest(compared, engines, fillvalue=0))
    change_s = _CHANGE_BYTES * max(max(engines) / 2, 1) / rates.memory  # if all elements change
    return max(0.0, dense_s - max(reads) / rates.memory) / change_s
