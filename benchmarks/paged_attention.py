"""Attention over the engine's key-value cache: a decoding step, and a chunk of a prompt.

`vllm` is the kernel of vLLM's attention on a CPU over its own layout of the cache; its schedule,
which is computed once a step, is not timed. Every call of a decoding step takes the next of many
caches, as a step takes the next layer. `share_of_limit` of a decoding step is of the machine's
read bandwidth, of a chunk of its rate of a large product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks._bench import OURS, Bench
from hybridengine.engine.vllm.environment import (
    CPU_BLOCK_SIZE,
    prepare_environment,
    vllm_available,
)
from hybridengine.kernels import paged_attention
from hybridengine.kernels.pages import HUGEPAGE, advise_pages

HEADS = {"9/3x64": (9, 3, 64), "14/2x64": (14, 2, 64), "32/8x128": (32, 8, 128)}
DECODING = [(512 + i * 1536 // 31, 1) for i in range(32)]  # (length, queries) of 32 sequences
BATCHES = {
    "decode": DECODING,
    "decode one": [(2048, 1)],
    "prefill": [(2048, 2048)],
    "chunk": [(2048, 512)],
}
QUICK = {"decode": [(40, 1), (70, 1)], "chunk": [(70, 40)]}
CACHES_BYTES = 256 << 20  # of all caches: several times the processor's cache


@dataclass
class Batch:
    query: Tensor  # [T, H, D]
    caches: Tensor  # [copies, blocks, H_kv, block_size, 2 * D], written in no particular layout
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor

    @property
    def out(self) -> Tensor:
        return torch.empty_like(self.query)


def run(bench: Bench) -> None:
    heads = {"quick": (4, 2, 32)} if bench.quick else HEADS
    for dtype in (torch.float32, torch.bfloat16):
        for head_name, shape in heads.items():
            for name, sequences in (QUICK if bench.quick else BATCHES).items():
                compare(bench, name, f"{name} {head_name}", shape, sequences, dtype)


def make_batch(
    sequences: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> Batch:
    blocks = [-(-length // CPU_BLOCK_SIZE) for length, _ in sequences]
    order = torch.randperm(sum(blocks)).int()
    table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, part in zip(table, order.split(blocks), strict=True):
        row[: len(part)] = part
    size = sum(blocks) * kv_heads * CPU_BLOCK_SIZE * 2 * dim * dtype.itemsize
    decoding = all(count == 1 for _, count in sequences)
    copies = max(2, min(64, CACHES_BYTES // size)) if decoding else 1
    shape = (copies, sum(blocks), kv_heads, CPU_BLOCK_SIZE, 2 * dim)
    caches = torch.empty(shape, dtype=dtype)
    advise_pages(caches.untyped_storage(), HUGEPAGE)  # as those of our engines
    for cache in caches:
        cache.copy_(torch.randn(cache.shape))
    counts = torch.tensor([0, *(count for _, count in sequences)])
    return Batch(
        torch.randn(int(counts.sum()), heads, dim).to(dtype),
        caches,
        table,
        counts.cumsum(0).int(),
        torch.tensor([length for length, _ in sequences]).int(),
    )


def compare(
    bench: Bench,
    name: str,
    shape: str,
    heads: tuple[int, int, int],
    sequences: list[tuple[int, int]],
    dtype: torch.dtype,
) -> None:
    batch = make_batch(sequences, *heads, dtype)
    num_heads, kv_heads, dim = heads
    implementations = {OURS: every_cache(batch, ours(batch))}
    if vllm_available():
        implementations["vllm"] = every_cache(batch, vllm(batch, kv_heads))
    tokens = sum(length for length, _ in sequences)
    pairs = sum(count * (2 * length - count + 1) // 2 for length, count in sequences)
    copies = len(batch.caches)
    bench.compare(
        "paged_attention",
        "forward",
        shape,
        dtype,
        implementations,
        bytes_moved=copies * tokens * kv_heads * 2 * dim * dtype.itemsize,
        flops=copies * 4 * pairs * num_heads * dim,
        peak="read" if name.startswith("decode") else "gemm",
    )


def every_cache(batch: Batch, call: Callable[[Tensor], object]) -> Callable[[], object]:
    def all_of_them() -> None:
        for cache in batch.caches:
            call(cache)

    return all_of_them


def ours(batch: Batch) -> Callable[[Tensor], object]:
    def call(cache: Tensor) -> object:
        sequences = (batch.block_table, batch.query_start_loc, batch.seq_lens)
        return paged_attention(batch.query, cache, *sequences, out=batch.out)

    return call


def vllm(batch: Batch, kv_heads: int) -> Callable[[Tensor], object]:
    prepare_environment()
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    _, heads, dim = batch.query.shape
    dtype = batch.query.dtype
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(batch.seq_lens),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        seq_lens=batch.seq_lens,
        dtype=dtype,
        query_start_loc=batch.query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=_get_attn_isa(dtype, CPU_BLOCK_SIZE, dim, "auto"),
        enable_kv_split=True,
    )

    def call(cache: Tensor) -> None:
        keys, values = cache.view(*cache.shape[:2], 2 * CPU_BLOCK_SIZE, dim).chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=batch.query,
            key_cache=keys,
            value_cache=values,
            output=batch.out,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            scale=dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=batch.block_table,
            softcap=0,
            scheduler_metadata=schedule,
            s_aux=None,
        )

    return call
