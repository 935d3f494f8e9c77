"""Machines as numbers: peaks, memories and links of a rank, and the shares that programs reach.

Data sheets, dense bfloat16 (NVIDIA): A100 80GB SXM (nvidia-a100-datasheet), H100 SXM5
(h100-datasheet), H200 SXM (h200-datasheet), B200 in a DGX B200 (dgx-b200-datasheet; per GPU). The
network is one port per GPU, as in the DGX of each generation: 200 Gb/s (A100), 400 Gb/s. NVLink
and network are given per direction, half of the sums that data sheets print.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from hybridengine.engine.vllm.environment import CPU_BLOCK_SIZE
from hybridengine.lab.simulate.config import ClusterConfig, EfficiencyConfig


@dataclass(frozen=True)
class Device:
    """The device of one rank.

    flops: FLOP/s in the compute type.
    memory_bytes: size of its memory.
    memory_rate: bytes per second that it reads from its memory.
    intra_rate, inter_rate, host_rate: bytes per second in one direction, to ranks of the same
      machine, to those of others, and to host memory.
    intra_latency_s, inter_latency_s: seconds until a message arrives.
    kv_block: tokens of a block of the engine's KV cache.
    """

    flops: float
    memory_bytes: float
    memory_rate: float
    intra_rate: float
    inter_rate: float
    host_rate: float
    intra_latency_s: float = 10e-6
    inter_latency_s: float = 25e-6
    kv_block: int = 16


_GB, _GIB = 1e9, 2.0**30
DEVICES = {
    "a100": Device(312e12, 80 * _GIB, 2039 * _GB, 300 * _GB, 25 * _GB, 25 * _GB),
    "h100": Device(989.5e12, 80 * _GIB, 3350 * _GB, 450 * _GB, 50 * _GB, 50 * _GB),
    "h200": Device(989.5e12, 141e9, 4800 * _GB, 450 * _GB, 50 * _GB, 50 * _GB),
    "b200": Device(2250e12, 180e9, 8000 * _GB, 900 * _GB, 50 * _GB, 50 * _GB),
}


@dataclass(frozen=True)
class Cluster:
    """Ranks in nodes, numbered node by node, and the time of basic operations on them.

    Times are seconds. `usable_bytes` is the memory of a rank that models, buffers and caches share.
    """

    device: Device
    nodes: int
    gpus_per_node: int
    usable_bytes: float
    efficiency: EfficiencyConfig

    @classmethod
    def of(cls, config: ClusterConfig) -> Cluster:
        """Build the cluster of a configuration; measures this machine for gpu=cpu."""
        device = measured_cpu(config.gpus_per_node) if config.gpu == "cpu" else DEVICES[config.gpu]
        given = {
            "flops": (config.tflops, 1e12),
            "memory_bytes": (config.memory_gib, _GIB),
            "memory_rate": (config.memory_gb_per_s, _GB),
            "intra_rate": (config.intra_gb_per_s, _GB),
            "inter_rate": (config.inter_gb_per_s, _GB),
            "host_rate": (config.host_gb_per_s, _GB),
            "intra_latency_s": (config.intra_latency_us, 1e-6),
            "inter_latency_s": (config.inter_latency_us, 1e-6),
        }
        replaced = {
            name: value * unit for name, (value, unit) in given.items() if value is not None
        }
        device = Device(**(device.__dict__ | replaced))
        usable = config.usable_memory * device.memory_bytes
        return cls(device, config.nodes, config.gpus_per_node, usable, config.efficiency)

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    def products(self, flops: float) -> float:
        return flops / (self.device.flops * self.efficiency.gemm)

    def attention(self, flops: float) -> float:
        return flops / (self.device.flops * self.efficiency.attention)

    def stream(self, num_bytes: float) -> float:
        """Time to read or write `num_bytes` of the device's memory."""
        return num_bytes / (self.device.memory_rate * self.efficiency.memory)

    def to_host(self, num_bytes: float) -> float:
        return num_bytes / (self.device.host_rate * self.efficiency.network)

    def all_gather(self, num_bytes: float, ranks: int) -> float:
        """All-gather or reduce-scatter of `num_bytes` in all over `ranks` consecutive ranks.

        Every rank receives (R-1)/R of the bytes inside its node at the NVLink rate; every node
        receives the part that others hold once, over all of its network ports (rings over all
        ports, as NCCL's). Latency grows with log2 R.
        """
        if ranks == 1:
            return 0.0
        in_node = min(ranks, self.gpus_per_node)
        nodes = ranks / in_node
        inside = num_bytes * (ranks - 1) / ranks / self.device.intra_rate
        across = num_bytes * (1 - 1 / nodes) / (in_node * self.device.inter_rate)
        return max(inside, across) / self.efficiency.network + self.latency(ranks)

    def all_reduce(self, num_bytes: float, ranks: int, *, across_nodes: bool = False) -> float:
        """Ring all-reduce of `num_bytes`: 2 (R-1)/R of them over the slowest link.

        across_nodes: no two of the ranks are in one node (replicas of HSDP).
        """
        if ranks == 1:
            return 0.0
        if not across_nodes:
            return 2 * self.all_gather(num_bytes, ranks) - self.latency(ranks)
        rate = self.device.inter_rate * self.efficiency.network
        hops = math.ceil(math.log2(ranks))
        return 2 * num_bytes * (ranks - 1) / ranks / rate + hops * self.device.inter_latency_s

    def all_to_all(self, num_bytes: float, ranks: int) -> float:
        """All-to-all in which a rank sends `num_bytes` to all others together."""
        if ranks == 1:
            return 0.0
        far = max(0.0, (ranks - self.gpus_per_node) / (ranks - 1))
        seconds = num_bytes * (1 - far) / self.device.intra_rate + num_bytes * far / (
            self.device.inter_rate
        )
        return seconds / self.efficiency.network + self.latency(ranks)

    def latency(self, ranks: int) -> float:
        """Latency of a collective over `ranks` consecutive ranks: log2 of them in hops."""
        inside = min(ranks, self.gpus_per_node)
        return math.ceil(math.log2(inside)) * self.device.intra_latency_s + (
            math.ceil(math.log2(max(1.0, ranks / inside))) * self.device.inter_latency_s
        )


@cache
def measured_cpu(ranks: int) -> Device:
    """Measure a rank's share of this machine: float32 products, and reading and copying memory.

    `ranks` processes share the cores, the memory bandwidth and, as their links, the copy bandwidth.
    Memory has to be given (cluster.memory_gib).
    """
    a = torch.ones(1024, 1024)
    data, target = torch.ones(1 << 25), torch.empty(1 << 25)
    products = 2 * 1024**3 / _fastest(lambda: a @ a)
    read = data.nbytes / _fastest(data.sum)
    copied = data.nbytes / _fastest(lambda: target.copy_(data))
    return Device(
        products / ranks,
        math.inf,
        read / ranks,
        copied / ranks,
        copied / ranks,
        copied / ranks,
        intra_latency_s=100e-6,
        inter_latency_s=100e-6,
        kv_block=CPU_BLOCK_SIZE,
    )


def _fastest(call: Callable[[], object], rounds: int = 4) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
