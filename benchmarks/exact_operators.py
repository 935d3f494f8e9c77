"""The other operators of exact rollouts: norm, gated activation, attention of trainer and engine.

`torch` is eager, `compile` the same by torch.compile. Attention of the trainer is compared with our
own that depends on the packing, decoding with PyTorch's over keys and values without pages; both
with FlashAttention 3's forward (`fa3`) where vLLM brings it. Linear layers: `decode_linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _baselines, _cute
from benchmarks._bench import OURS, Bench, Check
from hybridengine.kernels import (
    gated_activation,
    paged_attention,
    rms_norm,
    tree_attention,
    write_kv_cache,
)

HIDDEN, INTERMEDIATE = 4096, 11_008
ROWS = (32, 8192)
HEADS, KV_HEADS, DIM = 32, 8, 128
PACKS = ((8, 2048), (64, 256))  # sequences, tokens of each
DECODED = ((1, 4096), (32, 2048), (128, 1024))  # sequences, cached tokens of each
PAGE = 16
EPS = 1e-5


def run(bench: Bench) -> None:
    hidden, intermediate = (64, 96) if bench.quick else (HIDDEN, INTERMEDIATE)
    for rows in (8,) if bench.quick else ROWS:
        norm(bench, rows, hidden)
        activation(bench, rows, intermediate)
    heads = (4, 2, 32) if bench.quick else (HEADS, KV_HEADS, DIM)
    for pack in ((2, 24),) if bench.quick else PACKS:
        attention(bench, *pack, heads)
    for cached in ((2, 24),) if bench.quick else DECODED:
        decoding(bench, *cached, heads)


def draw(bench: Bench, *shape: int) -> Tensor:
    return torch.randn(shape, device=bench.device).bfloat16()


def llama_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def compare(
    bench: Bench,
    op: str,
    functions: dict[str, Callable[..., Tensor]],
    tensors: tuple[Tensor, ...],
    moved: int,
    moved_back: int,
    **peers: Callable[[], Callable[..., Tensor]],
) -> None:
    """Time forward, and forward with backward; moved, moved_back: bytes of each.

    peers: more baselines, by name.
    """
    compiled, missing = _baselines.available(
        compile=partial(_baselines.compiled, functions["torch"]), **peers
    )
    plain, functions = functions["torch"], functions | compiled
    leaves = [x.clone().requires_grad_() for x in tensors]
    shape = f"{tensors[0].shape[0]}x{tensors[0].shape[1]}"
    grad = torch.ones_like(tensors[0])

    def forward(function: Callable[..., Tensor]) -> tuple[Tensor]:
        with torch.no_grad():
            return (function(*tensors),)

    def both(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, grad)

    wide = [x.double().requires_grad_() for x in tensors]
    out = plain(*wide)
    exact = {"forward": (out.detach(),), "both": torch.autograd.grad(out, wide, grad.double())}
    for name, call, size in (("forward", forward, moved), ("both", both, moved + moved_back)):
        calls = {impl: partial(call, function) for impl, function in functions.items()}
        check = Check({impl: calls[impl] for impl in ("torch", *compiled)}, exact[name])
        rate: dict[str, Any] = {"bytes_moved": size, "peak": "copy", "check": check}
        bench.compare(op, name, shape, torch.bfloat16, calls, **rate)
        bench.leave_out(op, name, shape, torch.bfloat16, missing)


def norm(bench: Bench, rows: int, width: int) -> None:
    x, weight = draw(bench, rows, width), draw(bench, width)
    functions: dict[str, Callable[..., Tensor]] = {
        OURS: lambda x, weight: rms_norm(x, weight, EPS, round_first=True),
        "torch": partial(llama_norm, eps=EPS),
    }
    moved, moved_back = 2 * x.nbytes, 3 * x.nbytes
    peers = {"quack": partial(_cute.rms_norm, EPS)} if bench.device.type == "cuda" else {}
    compare(bench, "rms_norm", functions, (x, weight), moved, moved_back, **peers)


def activation(bench: Bench, rows: int, width: int) -> None:
    def plain(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    gate, up = draw(bench, rows, width), draw(bench, rows, width)
    functions: dict[str, Callable[..., Tensor]] = {OURS: gated_activation, "torch": plain}
    compare(bench, "gated_activation", functions, (gate, up), 3 * gate.nbytes, 5 * gate.nbytes)


def attention(bench: Bench, count: int, length: int, heads: tuple[int, int, int]) -> None:
    """Packed sequences: keys in the order of positions, and as they lie."""
    num_heads, kv_heads, dim = heads
    tokens = count * length
    q, k, v = (draw(bench, tokens, n, dim) for n in (num_heads, kv_heads, kv_heads))
    starts = torch.arange(tokens, device=bench.device) // length * length
    ends, positions = starts + length, torch.arange(tokens, device=bench.device) - starts

    def call(batch_invariant: bool) -> None:
        with torch.no_grad():
            tree_attention(q, k, v, ends, positions, batch_invariant=batch_invariant)

    cu_seqlens = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=bench.device)

    def flash() -> Callable[[], Tensor]:
        lengths = (length, cu_seqlens, length, cu_seqlens)
        return partial(_baselines.flash_attention_3(), q, k, v, *lengths, causal=True)

    def flash_4() -> Callable[[], Tensor]:
        return partial(_cute.flash_attention_4(), q, k, v, cu_seqlens, length)

    def first_sequence(peer: Callable[[], Tensor]) -> tuple[Tensor]:
        return (peer()[:length],)

    wide_q, wide_k, wide_v = (x[None, :length].transpose(1, 2).double() for x in (q, k, v))
    causal: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    exact = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, **causal)[0].transpose(0, 1)
    peers, missing = _baselines.available(fa3=flash, fa4=flash_4)
    shape = f"{count} x {length}"
    bench.compare(
        "tree_attention",
        "forward",
        shape,
        q.dtype,
        {OURS: partial(call, True), f"{OURS} by packing": partial(call, False), **peers},
        flops=2 * num_heads * dim * count * length * (length + 1),
        peak="gemm",
        check=Check({n: partial(first_sequence, peer) for n, peer in peers.items()}, [exact]),
    )
    bench.leave_out("tree_attention", "forward", shape, q.dtype, missing)


def decoding(bench: Bench, count: int, length: int, heads: tuple[int, int, int]) -> None:
    num_heads, kv_heads, dim = heads
    pages = -(-length // PAGE)
    device = bench.device
    cache = torch.zeros(count * pages, kv_heads, PAGE, 2 * dim, device=device).bfloat16()
    table = torch.randperm(count * pages, device=device).int().view(count, pages)
    keys, values = (draw(bench, count * length, kv_heads, dim) for _ in range(2))
    positions = torch.arange(length, device=device)
    slots = table[:, positions // PAGE].long() * PAGE + positions % PAGE
    write_kv_cache(keys, values, cache, slots.flatten())
    query = draw(bench, count, num_heads, dim)
    starts = torch.arange(count + 1, device=device).int()
    lengths = torch.full((count,), length, device=device).int()
    dense_keys, dense_values = (
        x.view(count, length, kv_heads, dim).transpose(1, 2).contiguous() for x in (keys, values)
    )

    def sdpa() -> Tensor:
        rows = query[:, :, None]
        return F.scaled_dot_product_attention(rows, dense_keys, dense_values, enable_gqa=True)

    def flash() -> Callable[[], Tensor]:
        pages = (x.contiguous() for x in cache.transpose(1, 2).split(dim, -1))
        sizes: tuple[Any, ...] = (1, starts, length)
        more: dict[str, Any] = {"seqused_k": lengths, "block_table": table, "causal": True}
        return partial(_baselines.flash_attention_3(), query, *pages, *sizes, **more)

    def flash_4() -> Callable[[], Tensor]:
        pages = (x.contiguous() for x in cache.transpose(1, 2).split(dim, -1))
        return partial(_cute.paged_flash_attention_4(), query, *pages, table, starts, lengths)

    exact = F.scaled_dot_product_attention(
        query[:, :, None].double(), dense_keys.double(), dense_values.double(), enable_gqa=True
    ).view_as(query)
    peers, missing = _baselines.available(fa3=flash, fa4=flash_4)
    results = {n: partial(one_result, peer, query.shape) for n, peer in peers.items()}
    ours = partial(paged_attention, query, cache, table, starts, lengths)
    shape = f"decode {count} x {length}"
    bench.compare(
        "paged_attention",
        "forward",
        shape,
        query.dtype,
        {OURS: ours, "sdpa": sdpa, **peers},
        bytes_moved=keys.nbytes + values.nbytes,
        peak="read",
        check=Check(results, [exact]),
    )
    bench.leave_out("paged_attention", "forward", shape, query.dtype, missing)


def one_result(peer: Callable[[], Tensor], shape: torch.Size) -> tuple[Tensor]:
    return (peer().view(shape),)
