"""Attention over packed sequences and forests against PyTorch's, on the same tokens.

`sdpa` is one call for all sequences, which are equally long, the best case for it; a forest is
unpacked for it, every response with a copy of its prompt, as a trainer without shared prefixes
does. In bfloat16 `sdpa_fp32` converts to float32 first. On a GPU `varlen` is torch's
FlashAttention 2 over packed sequences, `fa4` FlashAttention 4, `fa3` the forward of FlashAttention
3 that vLLM brings; `varlen_deterministic` as with `actor.deterministic`, `fa4_deterministic`
likewise. Ours is what training calls, FlashAttention where it can; `triton` are our own kernels,
which always add in a fixed order. W is a window: SDPA then takes a mask.
Operations are those of the visible pairs of a query and a key, each counted once. On a GPU the
results of baselines are compared with float64 first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _cute
from benchmarks._baselines import available, flash_attention_3
from benchmarks._bench import OURS, Bench, Check
from hybridengine.kernels import tree_attention
from hybridengine.kernels.attention.varlen import flash_attention


class Heads(NamedTuple):
    """Query heads, key and value heads, and their size."""

    query: int
    key: int
    size: int


HEADS = Heads(9, 3, 64)
WIDE = Heads(32, 8, 128)  # of an 8B model; in bfloat16, on a GPU
PLAIN = ((20_480, 2560), (2208, 23))  # tokens, and those of a sequence
WINDOW = 512


def run(bench: Bench) -> None:
    on_gpu = bench.quick or bench.device.type == "cuda"
    if on_gpu:
        tokens, length = (96, 24) if bench.quick else PLAIN[0]
        group = (2, 20, 5) if bench.quick else (8, 2048, 512)
        paths, shape = paths_of(tokens, length), f"{tokens // length} x {length}"
        compare(bench, shape, paths, torch.bfloat16, heads=WIDE)
        shape = "G={} P={} R={}".format(*group)
        compare(bench, shape, _paths_of_group(*group), torch.bfloat16, heads=WIDE)
    for dtype in (torch.bfloat16, torch.float32):  # what a limit cuts off is at the end
        for tokens, length in ((96, 24),) if bench.quick else PLAIN:
            compare(bench, f"{tokens // length} x {length}", paths_of(tokens, length), dtype)
        if dtype == torch.bfloat16 and on_gpu:
            tokens, length = (96, 24) if bench.quick else PLAIN[0]
            window = min(WINDOW, length // 2)
            shape = f"{tokens // length} x {length} W={window}"
            compare(bench, shape, paths_of(tokens, length), dtype, window)
        for size in [(2, 20, 5)] if bench.quick else [(8, 2048, 512), (8, 20, 3)]:
            compare(bench, "G={} P={} R={}".format(*size), _paths_of_group(*size), dtype)


def paths_of(tokens: int, length: int) -> Tensor:
    return torch.arange(tokens).view(-1, length)


def _paths_of_group(responses: int, prompt: int, length: int) -> Tensor:
    """Return the tokens of every response with its prompt, in a forest of one prompt."""
    shared = torch.arange(prompt).expand(responses, -1)
    own = prompt + torch.arange(responses * length).view(responses, length)
    return torch.cat([shared, own], 1)


def compare(
    bench: Bench,
    shape: str,
    paths: Tensor,
    dtype: torch.dtype,
    window: int | None = None,
    heads: Heads = HEADS,
) -> None:
    """paths: [sequences, length], the packed token of each; shared ones occur several times.

    window: number of tokens that a token sees, of sequences that share none.
    """
    if heads != HEADS:
        shape += f" D={heads.size}"
    paths = paths.to(bench.device)
    tokens = int(paths.max()) + 1
    # A token's subtree ends after the last token of the sequences that have it.
    ends = torch.zeros(tokens, dtype=torch.int64, device=bench.device)
    ends.scatter_reduce_(0, paths.flatten(), paths[:, -1:].expand_as(paths).flatten() + 1, "amax")
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        values = torch.randn(tokens, count, heads.size, generator=generator)
        return values.to(bench.device, dtype)

    tensors, grad = [draw(heads.query), draw(heads.key), draw(heads.key)], draw(heads.query)
    positions = torch.arange(tokens, device=bench.device) % paths.shape[1]
    ours = partial(tree_attention, subtree_ends=ends, position_ids=positions, window_size=window)
    functions = {OURS: partial(ours, flash=True), "sdpa": partial(_sdpa, paths, window)}
    if dtype != torch.float32:
        functions["sdpa_fp32"] = partial(_sdpa_fp32, paths, window)
    forwards = dict[str, Callable[..., Tensor]]()
    fixed_order = dict[str, Callable[..., Tensor]]()
    if dtype != torch.float32 and bench.device.type == "cuda":
        if window is None:
            functions["triton"] = ours
        functions["varlen"] = partial(_packed, _varlen(window), paths)
        peers, missing = available(fa4=_cute.flash_attention_4)
        for name, peer in peers.items():
            functions[name] = partial(_packed, partial(peer, window=window), paths)
            same = partial(peer, window=window, deterministic=True)
            fixed_order[f"{name}_deterministic"] = partial(_packed, same, paths)
        for pass_ in ("forward", "both"):
            bench.leave_out("attention", pass_, shape, dtype, missing)
        peers, missing = available(fa3=partial(_flash_attention_3, window))
        bench.leave_out("attention", "forward", shape, dtype, missing)
        forwards = {name: partial(_packed, peer, paths) for name, peer in peers.items()}
    known = functions | forwards | fixed_order

    def forward(name: str) -> tuple[Tensor]:
        with torch.no_grad():
            return (known[name](*tensors),)

    def forward_backward(name: str) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = known[name](*leaves)
        same = out.shape[0] == tokens
        return torch.autograd.grad(out, leaves, grad if same else grad[paths.flatten()])

    def deterministic(name: str) -> tuple[Tensor, ...]:
        with _fixed_order():
            return forward_backward(name)

    seen = (ends - torch.arange(tokens, device=bench.device)).clamp(max=window or tokens)
    flops = 4 * heads.query * heads.size * int(seen.sum())
    exact = _exact(paths, window, tensors, grad) if bench.gpu or bench.quick else {}
    passes = (
        ("forward", forward, 1.0, functions | forwards),
        ("both", forward_backward, 3.5, functions | fixed_order),
    )
    for name, call, count, timed in passes:
        calls: dict[str, Callable[[], Any]] = {impl: partial(call, impl) for impl in timed}
        if name == "both" and "varlen" in timed:
            calls["varlen_deterministic"] = partial(deterministic, "varlen")
        baselines = {impl: call for impl, call in calls.items() if impl not in (OURS, "triton")}
        check = Check(baselines, exact[name]) if exact else None
        rate: dict[str, Any] = {"flops": int(flops * count), "peak": "gemm", "check": check}
        bench.compare("attention", name, shape, dtype, calls, **rate)


def _exact(
    paths: Tensor, window: int | None, tensors: list[Tensor], grad: Tensor
) -> dict[str, list[Tensor]]:
    """Return the results of baselines in float64, by pass: of every path, and its gradients."""
    leaves = [x.double().requires_grad_() for x in tensors]
    outs, sums = [], [torch.zeros_like(x) for x in leaves]
    for path in paths:
        out = _sdpa(path[None], window, *leaves)
        grads = torch.autograd.grad(out, leaves, grad[path].double())
        sums = [total + part for total, part in zip(sums, grads, strict=True)]
        outs.append(out.detach())
    return {"forward": [torch.cat(outs)], "both": sums}


@contextmanager
def _fixed_order() -> Iterator[None]:
    """Let torch add in a fixed order, as `choose_flash_kernel(deterministic=True)` does."""
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = fills


def _sdpa(paths: Tensor, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x[paths].transpose(1, 2) for x in (q, k, v))
    mask = None
    if window is not None:
        rows = torch.arange(paths.shape[1], device=paths.device)
        distance = rows[:, None] - rows
        mask = (distance >= 0) & (distance < window)
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None}
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    return out.transpose(1, 2).flatten(0, 1)


def _packed(attend: Callable[..., Tensor], paths: Tensor, *tensors: Tensor) -> Tensor:
    """Call attend(q, k, v, cu_seqlens, length) with packed copies of sequences of equal length."""
    count, length = paths.shape
    if count * length > tensors[0].shape[0]:  # tokens that occur several times
        tensors = tuple(x[paths.flatten()] for x in tensors)
    ends = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=paths.device)
    return attend(*tensors, ends, length)


def _varlen(window: int | None) -> Callable[..., Tensor]:
    return lambda q, k, v, ends, length: flash_attention(
        q, k, v, ends, length, q.shape[-1] ** -0.5, window
    )


def _flash_attention_3(window: int | None) -> Callable[..., Tensor]:
    sizes = None if window is None else [window - 1, 0]
    attend = partial(flash_attention_3(), causal=True, window_size=sizes)
    return lambda q, k, v, ends, length: attend(q, k, v, length, ends, length, cu_seqlens_k=ends)


def _sdpa_fp32(paths: Tensor, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _sdpa(paths, window, q.float(), k.float(), v.float()).to(q.dtype)
