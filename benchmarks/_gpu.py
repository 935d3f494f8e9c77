"""Timing on a GPU: cold caches, graph replay for short calls, and the state of the machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

Call = Callable[[], object]

# Calls are captured that are shorter, or take half of their time on the host at least: there
# Python and launches would hide the kernels.
GRAPH_BELOW_MS = 1.0
REPEATS = 10  # calls per captured graph
MAX_SAMPLES = 200
# By the names of `nvidia-smi --help-query-gpu`.
STATE = (
    *("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw"),
    "clocks_throttle_reasons.active",
)


class Samples(NamedTuple):
    ms: list[float]  # device time of a call, one per sample
    host_ms: float  # Python and launches of a call, without waiting for the device
    timing: str  # "graph", "events", or "events: " and why a short call was not captured


class Gpu:
    """The device calls that timing needs. Everything runs on one stream, which can be captured."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        properties = torch.cuda.get_device_properties(device)
        self._flushed = torch.ones(properties.L2_cache_size, device=device)  # 4 times the L2 cache
        self._sum = torch.empty((), device=device)

    def warm_up(self, call: Call) -> None:
        """Run `call` once, after what made its inputs on another stream."""
        torch.cuda.synchronize(self.device)
        self.run(call)
        torch.cuda.synchronize(self.device)

    def answers(self) -> bool:
        """Return whether this process can still use the device; false after a fault in a kernel."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def run(self, call: Call) -> None:
        with torch.cuda.stream(self._stream):
            call()

    def flush(self) -> None:
        """Replace what the L2 cache holds. Reading leaves no lines to write back later."""
        torch.sum(self._flushed, 0, out=self._sum)

    def elapsed_ms(self, call: Call) -> float:
        """Run `call` with a cold cache; return its device time."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            self.flush()
            begin.record()
            call()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def host_ms(self, call: Call) -> float:
        """Return the time until `call` returns, with the device idle before it."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        self.run(call)
        return (time.perf_counter() - start) * 1e3

    def why_not_captured(self, call: Call) -> str:
        """Return the reason if `call` waits for the device; "" if it may be captured.

        A failed capture would leave the random generator unusable, so this runs without one.
        """
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.run(call)
        except Exception as error:
            return f"not captured: {str(error).splitlines()[0]}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return ""

    def capture(self, call: Call) -> Call:
        """Capture REPEATS times `call`; return the replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for _ in range(REPEATS):
                call()
        return graph.replay

    def peak_mib(self, call: Call) -> float:
        """Return the largest memory that `call` has allocated at once."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.run(call)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def state(self) -> dict[str, str]:
        """Read clocks, temperature and power; empty where nvidia-smi does not answer."""
        uuid = torch.cuda.get_device_properties(self.device).uuid
        query = ["--query-gpu=" + ",".join(STATE), "--format=csv,noheader", "-i", f"GPU-{uuid}"]
        try:
            done = subprocess.run(
                ["nvidia-smi", *query], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return {}
        values = done.stdout.strip().split(", ")
        return dict(zip(STATE, values, strict=True)) if len(values) == len(STATE) else {}


def time_call(gpu: Gpu, call: Call, budget_s: float) -> Samples:
    """Time `call`, which has run before: with events, or by replay where it is short.

    A sample of a replay is that of REPEATS times flush and call, minus that of the flushes alone,
    divided by REPEATS: the device time of a call with a cold cache, without launch gaps.
    """
    host_ms = median(gpu.host_ms(call) for _ in range(5))
    elapsed_ms = median(gpu.elapsed_ms(call) for _ in range(3))
    short = elapsed_ms < max(GRAPH_BELOW_MS, 2 * host_ms)
    timing = gpu.why_not_captured(call) if short else ""
    if not short or timing:
        samples = _repeat(lambda: gpu.elapsed_ms(call), budget_s)
        return Samples(samples, host_ms, f"events: {timing}" if timing else "events")

    def flush_and_call() -> None:
        gpu.flush()
        call()

    try:
        replay, flushes = gpu.capture(flush_and_call), gpu.capture(gpu.flush)
    except RuntimeError as error:
        reason = f"events: not captured: {str(error).splitlines()[0]}"
        return Samples(_repeat(lambda: gpu.elapsed_ms(call), budget_s), host_ms, reason)
    samples = _repeat(
        lambda: (gpu.elapsed_ms(replay) - gpu.elapsed_ms(flushes)) / REPEATS, budget_s
    )
    return Samples(samples, host_ms, "graph")


def _repeat(sample: Callable[[], float], budget_s: float) -> list[float]:
    samples: list[float] = []
    done = time.perf_counter() + budget_s
    while len(samples) < 5 or (time.perf_counter() < done and len(samples) < MAX_SAMPLES):
        samples.append(sample())
    return samples
