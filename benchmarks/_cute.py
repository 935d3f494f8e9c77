"""Baselines written in CuTe-DSL: quack's kernels, FlashAttention 4, and Liger's for Hopper.

Every function imports its package and returns a callable; it raises what the import raises. quack
runs the configurations that it chooses without a search. `tools/gpu_peers.py` has their versions
and compiles their kernels ahead of time, by the calls below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
IGNORED = -100  # the label of tokens without a loss
QUACK_CHUNK = 8192  # its default, 4096, raises an error where hidden states have as many columns


def log_probs(inplace_backward: bool = False) -> Function:
    """(logits [T, V], token_ids [T]) -> (log_probs,); in place: the gradient over the logits."""
    from quack import cross_entropy

    return lambda logits, ids: (
        -cross_entropy(logits, ids, reduction="none", inplace_backward=inplace_backward),
    )


def log_probs_from_hidden() -> Function:
    """(hidden [T, H], weight [V, H], ids) -> (log_probs,): cuBLAS, then quack on all logits."""
    from quack.linear_cross_entropy import linear_cross_entropy_func

    return lambda hidden, weight, ids: (
        -linear_cross_entropy_func(
            hidden, weight, None, ids, reduction="none", inplace_backward=True
        ),
    )


def fused_log_probs_from_hidden() -> Function:
    """The same without logits in memory; no gradients."""
    from quack.epilogue.library import lse_target_epi

    def call(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor]:
        found = lse_target_epi(hidden, weight.mT, store_d=False, target=ids, tuned=False)
        return (found["target_logit"] - found["lse"],)

    return call


def cross_entropy_from_hidden() -> Function:
    """(hidden, weight, labels) -> mean cross-entropy, whose gradients the forward computes."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda hidden, weight, labels, *_: chunked_linear_cross_entropy(
        hidden, weight, labels, chunk_size=QUACK_CHUNK, ignore_index=IGNORED, reduction="mean"
    )


def liger_cross_entropy_from_hidden() -> Function:
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as sm90

    function = sm90.LigerFusedLinearCrossEntropySM90Function.apply
    return lambda hidden, weight, labels, *_: function(hidden, weight, labels, IGNORED, "mean")


def flash_attention_4() -> Function:
    """(q [T, H, D], k, v [T, H_kv, D], cu_seqlens, length, window, deterministic) -> [T, H, D]."""
    from flash_attn.cute import flash_attn_varlen_func

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        length: int,
        window: int | None = None,
        deterministic: bool = False,
    ) -> Tensor:
        ends = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        lengths = {"max_seqlen_q": length, "max_seqlen_k": length}
        sides = None if window is None else window - 1, 0
        options = {"causal": True, "window_size": sides, "deterministic": deterministic}
        return flash_attn_varlen_func(q, k, v, **ends, **lengths, **options)[0]

    return call


def paged_flash_attention_4() -> Function:
    """(q [B, H, D], keys, values [pages, page, H_kv, D], table, cu_seqlens_q, lengths) -> q's."""
    from flash_attn.cute import flash_attn_varlen_func

    return lambda q, keys, values, table, cu_seqlens_q, lengths: flash_attn_varlen_func(
        *(q, keys, values),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=1,
        seqused_k=lengths,
        page_table=table,
        causal=True,
    )[0]


def rms_norm(eps: float) -> Function:
    """(x [T, H], weight [H]) -> [T, H]."""
    from quack import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=eps)


def grouped_product() -> Function:
    """(x [T, K], weight [E, N, K], cu_counts [E + 1]) -> [T, N], with both gradients."""
    from quack.gemm_interface import gemm

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, cu_counts: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight, cu_counts)
            return gemm(x, weight.mT, cu_seqlens_m=cu_counts, tuned=False)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
            (grad,), (x, weight, cu_counts) = grads, ctx.saved_tensors
            # quack asks the driver, for which a thread of autograd needs the context of a call.
            torch.cuda.Event().record()
            grad_x = gemm(grad, weight, cu_seqlens_m=cu_counts, tuned=False)
            return grad_x, gemm(grad.mT, x, cu_seqlens_k=cu_counts, tuned=False), None

    return Product.apply
