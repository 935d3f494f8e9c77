"""Compile the CuTe-DSL kernels that the benchmarks time, without a GPU; a step of gpu_peers.py.

    python tools/gpu_peers_compile.py

Calls the baselines of `benchmarks/_cute.py` with fake CUDA tensors of the shapes of the benchmarks:
what the packages compile goes into their own caches (the environment of `gpu_report.py --peers`),
and a call that does not fit a package fails here. Kernels are not launched. Prints a line for each
baseline; exits with 1 if one failed. Not compiled here: the deterministic backward of
flash-attn-4, which needs addresses, the backward of quack's norm, and Liger's kernels, which have
no cache.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from benchmarks import _cute, attention, exact_operators, grouped_linear, linear, logprob

H200_CLUSTERS, H200_MULTIPROCESSORS = 66, 132
GPU: Any = SimpleNamespace(device=torch.device("cuda"), quick=False)  # a Bench, for its shapes
BF16 = torch.bfloat16


class Context:
    """What an autograd function keeps between its passes."""

    needs_input_grad = (True,) * 64
    saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def both_passes(function: type, *arguments: Any) -> Any:
    """In place of `torch.autograd.Function.apply`: the engine does not run on fake CUDA tensors."""
    context: Any = Context()
    passes: Any = function
    with torch.no_grad():
        out = passes.forward(context, *arguments)
        outs = out if isinstance(out, tuple) else (out,)
        if any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            passes.backward(context, *(None if x is None else torch.empty_like(x) for x in outs))
    return out


def item(tensor: Tensor, key: Any) -> Tensor:
    """In place of `Tensor.__getitem__`, which asks the driver for the device: slices alone."""
    for dim, part in enumerate(key if isinstance(key, tuple) else (key,)):
        begin, end, _ = part.indices(tensor.shape[dim])
        tensor = tensor.narrow(dim, begin, end - begin)
    return tensor


def draw(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    floating = dtype.is_floating_point
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=grad and floating)


def ids(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return draw(count, dtype=dtype)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every baseline with its arguments, as the benchmarks call it."""
    for rows, vocab in logprob.shapes(GPU):
        for dtype in (torch.float32, BF16):
            yield f"quack V={vocab} {dtype}", partial(log_probs, rows, vocab, dtype)
    for rows, width, vocab, _ in linear.shapes(GPU):
        # Of `log_probs_from_hidden`, whose product is torch's.
        yield f"quack V={vocab}", partial(log_probs, rows, vocab, BF16)
        yield "quack, fused", partial(head, _cute.fused_log_probs_from_hidden, rows, width, vocab)
        # In slices of 128 rows, too, which are compared.
        for count in (rows, linear.FEW):
            with_gradients = partial(head, _cute.cross_entropy_from_hidden, count, width, vocab)
            yield f"quack, cross-entropy {count}", torch.enable_grad()(with_gradients)
    yield "Liger, imported", _cute.liger_cross_entropy_from_hidden
    large = (exact_operators.HEADS, exact_operators.KV_HEADS, exact_operators.DIM)
    for tokens, length in attention.PLAIN:
        for window in (None, attention.WINDOW):
            name = f"flash-attn-4 {tokens // length} x {length} W={window}"
            yield name, partial(packed, tokens, length, attention.HEADS, window)
    for count, length in exact_operators.PACKS:
        name = f"flash-attn-4 {count} x {length}, {large[0]} heads"
        yield name, partial(packed, count * length, length, large, None)
    for count, length in exact_operators.DECODED:
        yield f"flash-attn-4, pages, {count} x {length}", partial(paged, count, length, large)
    for rows in exact_operators.ROWS:
        yield f"quack, rms_norm {rows}", partial(norm, rows, exact_operators.HIDDEN)
    for tokens, k, n in grouped_linear.SHAPES:
        yield f"quack, grouped product K={k} N={n}", partial(grouped, tokens, k, n)


def log_probs(rows: int, vocab: int, dtype: torch.dtype) -> None:
    _cute.log_probs()(draw(rows, vocab, dtype=dtype), ids(rows))


def head(make: Callable[[], _cute.Function], rows: int, width: int, vocab: int) -> None:
    make()(draw(rows, width), draw(vocab, width), ids(rows))


def packed(tokens: int, length: int, heads: tuple[int, int, int], window: int | None) -> None:
    num_heads, kv_heads, dim = heads
    for grad in (False, True):
        q, k, v = (draw(tokens, n, dim, grad=grad) for n in (num_heads, kv_heads, kv_heads))
        cu_seqlens = ids(tokens // length + 1, torch.int32)
        _cute.flash_attention_4()(q, k, v, cu_seqlens, length, window=window)


def paged(count: int, length: int, heads: tuple[int, int, int]) -> None:
    num_heads, kv_heads, dim = heads
    pages, size = -(-length // exact_operators.PAGE), exact_operators.PAGE
    cache = [draw(count * pages, size, kv_heads, dim, grad=False) for _ in "kv"]
    table = draw(count, pages, dtype=torch.int32)
    starts, lengths = ids(count + 1, torch.int32), ids(count, torch.int32)
    query = draw(count, num_heads, dim, grad=False)
    _cute.paged_flash_attention_4()(query, *cache, table, starts, lengths)


def norm(rows: int, width: int) -> None:
    _cute.rms_norm(exact_operators.EPS)(draw(rows, width, grad=False), draw(width, grad=False))


def grouped(tokens: int, k: int, n: int) -> None:
    experts = grouped_linear.NUM_EXPERTS
    x, weight = draw(tokens * grouped_linear.TOP_K, k), draw(experts, n, k)
    _cute.grouped_product()(x, weight, ids(experts + 1, torch.int32))


def without_gpu() -> list[Any]:
    """Patches: no launches, and the answers of an H200 in place of the driver's."""
    import cutlass.utils
    import quack.linear_cross_entropy as fused
    from cutlass.cutlass_dsl import tvm_ffi_provider as compiled

    def compile_fused(
        x: Tensor, weight: Tensor, target: Tensor, chunk: int, ignored: int, *rest: Any
    ) -> list[Tensor]:
        dx, dw, scale, tile = rest
        keys = {"need_dx": dx, "need_dw": dw, "grad_scale": scale, "tile_n1": tile}
        return list(
            fused.scaled_exp_linear_cross_entropy_fwd(x, weight, target, chunk, ignored, **keys)
        )

    hardware = mock.Mock()
    hardware.return_value.get_max_active_clusters.return_value = H200_CLUSTERS
    hardware.return_value.get_device_multiprocessor_count.return_value = H200_MULTIPROCESSORS
    launches = [
        mock.patch.object(getattr(compiled, name), "__call__", lambda *_, **__: None)
        for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs")
    ]
    return [
        *launches,
        mock.patch.object(FakeTensor, "__getitem__", item),
        mock.patch.object(torch.autograd.Function, "apply", classmethod(both_passes)),
        mock.patch.object(torch.cuda, "Event", mock.Mock()),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch._subclasses.fake_tensor, "init_gpu_context", lambda *_: None),
        mock.patch.object(cutlass.utils, "HardwareInfo", hardware),
        mock.patch.object(torch.ops.quack, "lce_scaled_exp_fwd", compile_fused),
        mock.patch.object(fused, "lce_glue", lambda *_, **__: None),  # a Triton kernel
    ]


def main() -> int:
    failed = []
    patches = without_gpu()
    for patch in patches:
        patch.start()
    with FakeTensorMode(), torch.no_grad():
        for name, call in cases():
            started = time.perf_counter()
            try:
                call()
            except Exception:
                traceback.print_exc()
                failed.append(name)
            state = "failed" if name in failed else "compiled"
            print(f"{state}: {name}, {time.perf_counter() - started:.1f} s", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
