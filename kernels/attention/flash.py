"""FlashAttention over packed sequences as two plain functions, without autograd.

Both take how the sequences lie in memory as `Runs`: a causal call has the same boundaries for
queries and keys, a call between two runs of tokens has one of each. The backward takes `out` and
`lse` from its caller, so that they may be those of more keys than it is called with: its gradients
are then the part of these keys (see `cascade.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Runs(NamedTuple):
    """Which queries attend to which keys: the i-th run of queries to the i-th run of keys.

    cu_seqlens_q, cu_seqlens_k: int32 [runs + 1] each, the boundaries, in tokens.
    max_seqlen_q, max_seqlen_k: the longest run of queries that have keys, and of keys that have
      queries; the results of others are not read.
    causal: whether query j of a run sees only keys up to j; both runs then have the same length.
    softmax_scale: factor of q . k.
    window_size: keys that a query sees, its own included; only if causal; None: all.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    softmax_scale: float
    window_size: int | None = None


class FlashPair(NamedTuple):
    """The two passes of one implementation.

    forward: (query [T, H, D], key, value [T_k, H_kv, D], Runs) -> out [T, H, D], lse [H, T]
      float32. Rows without keys hold anything.
    backward: (grad_out, query, key, value, out, lse, Runs) -> the gradients of query, key, value.
      Rows without keys, or keys without queries, hold anything.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Runs], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Runs], tuple[Tensor, Tensor, Tensor]
    ]


def aten_forward(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Forward of torch's FlashAttention 2 (CUDA, float16 or bfloat16, D a multiple of 8)."""
    causal, window = _mask_of(runs)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, *runs[:4], 0.0, causal, False),
        scale=runs.softmax_scale,
        **window,
    )
    return out, lse


def aten_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: Runs,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of torch's FlashAttention 2.

    Sums run in a fixed order where `torch.use_deterministic_algorithms` says so.
    """
    causal, window = _mask_of(runs)
    unread = lse.new_empty(2, dtype=torch.uint64)  # the state of dropout, of which there is none
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(grad_out, query, key, value, out, lse, *runs[:4], 0.0, causal, unread, unread),
        scale=runs.softmax_scale,
        **window,
    )
    return grads


def _mask_of(runs: Runs) -> tuple[bool, dict[str, int]]:
    """Return aten's is_causal and window: it takes a causal window as a window, not as causal."""
    if not runs.causal or runs.window_size is None:
        return runs.causal, {}
    return False, {"window_size_left": runs.window_size - 1, "window_size_right": 0}


ATEN = FlashPair(aten_forward, aten_backward)


def takes(
    query: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    softmax_scale: float,
    window_size: int | None,
    softcap: float | None,
) -> bool:
    """Return whether the calls over a forest can compute its attention."""
    size = query.shape[-1]
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    plain = sinks is None and window_size is None and softcap is None and softmax_scale > 0
    return half and plain and size == value.shape[-1] and size % 8 == 0 and size <= 256


def cute_pair(interface: Any) -> FlashPair:
    """Return FlashAttention 4's passes, of the module `flash_attn.cute.interface`.

    These two functions are what torch itself calls as its "FA4".
    """

    def options_of(runs: Runs) -> dict[str, Any]:
        limited = runs.causal and runs.window_size is not None
        return {
            "softmax_scale": runs.softmax_scale,
            "causal": runs.causal and not limited,
            "window_size_left": runs.window_size - 1 if limited and runs.window_size else None,
            "window_size_right": 0 if limited else None,
            "cu_seqlens_q": runs.cu_seqlens_q,
            "cu_seqlens_k": runs.cu_seqlens_k,
        }

    def forward(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
        longest = {"max_seqlen_q": runs.max_seqlen_q, "max_seqlen_k": runs.max_seqlen_k}
        options = options_of(runs) | longest
        out, lse, *_ = interface._flash_attn_fwd(query, key, value, return_lse=True, **options)
        return out, lse

    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        runs: Runs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        fixed_order = torch.are_deterministic_algorithms_enabled()
        # Without the longest runs, by which it would allocate for the runs that are not read, too.
        grads: tuple[Tensor, Tensor, Tensor] = interface._flash_attn_bwd(
            *(query, key, value, out, grad_out, lse),
            **options_of(runs),
            deterministic=fixed_order,
        )
        return grads

    return FlashPair(forward, backward)
