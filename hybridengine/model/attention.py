"""Attention over packed sequences, as one function every transformers model can call.

The input is one row `[1, T]` of sequences laid end to end; `cu_seq_lens_q` says where each begins.
No token sees another sequence, and no mask is built. Importing this module registers `ATTENTION`
with transformers, whose models forward `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` unchanged.

CUDA in half precision runs flash-attn if it is installed, else `torch.nn.attention.varlen`. The
rest takes the block path: sequences are right-padded to a coarse grid of lengths, and each length
is one SDPA call. Causal attention never looks right, so the padding is exact, and a sequence's
result does not depend on its neighbours. Without `cu_seq_lens_q` every row is one sequence;
padding masks and KV caches then work as in transformers' `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from hybridengine.model.errors import ModelError
from hybridengine.model.ulysses import heads_for_tokens, tokens_for_heads

__all__ = ["ATTENTION", "varlen_attention"]

ATTENTION = "hybridengine_varlen"

_QUERY_BLOCK = 256  # rows of scores held at once where SDPA's causal flag is not enough
_EXACT_LENGTH = 512  # from here a sequence fills a call by itself: no padding to share one

# Tensors that models hand down to attention and that do not change its result.
_HARMLESS = {"num_items_in_batch", "seq_idx", "cache_position", "position_embeddings", "labels"}


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    position_ids: torch.Tensor | None = None,
    sequence_parallel: dist.ProcessGroup | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention: query [B, H, T, D], key and value [B, H_kv, T, D*] -> [B, T, H, D_v].

    Packed when `cu_seq_lens_q` (int32 [num_seqs + 1]) is given: then B is 1. H is a multiple of
    H_kv. Supports a sliding window, logit soft-cap and any scaling; differentiable. With
    `sequence_parallel`, T is this rank's part of the tokens that `cu_seq_lens_q` counts.

    Raises:
        ModelError: for anything else a layer asks for (attention sinks, dropout, position bias,
            bidirectional attention, ...), naming the layer and the feature.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    _refuse_unsupported(module, dropout, is_causal, kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cu_seq_lens_q is None:
        out = _rows(
            module,
            query,
            key,
            value,
            attention_mask,
            position_ids,
            scaling,
            sliding_window,
            softcap,
        )
        return out.transpose(1, 2).contiguous(), None
    if attention_mask is not None:
        raise _error(module, "an attention_mask beside cu_seq_lens_q", "pass one of the two")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise _error(
            module,
            f"packed query {tuple(query.shape)} with key {tuple(key.shape)}",
            "pack into one row [1, T], with use_cache=False",
        )
    if cu_seq_lens_k is not None and not (
        cu_seq_lens_k is cu_seq_lens_q or torch.equal(cu_seq_lens_k, cu_seq_lens_q)
    ):
        raise _error(module, "cu_seq_lens_k unlike cu_seq_lens_q", "pass the same tensor for both")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if sequence_parallel is not None:
        q, k, v = heads_for_tokens(q, k, v, sequence_parallel)
    kernel = _cuda_kernel(q, v, softcap)
    if kernel is not None:
        if max_length_q is None:
            max_length_q = int(cu_seq_lens_q.diff().max())
        out = kernel(q, k, v, cu_seq_lens_q, max_length_q, scaling, sliding_window, softcap)
    else:
        out = _packed_blocks(module, q, k, v, cu_seq_lens_q, scaling, sliding_window, softcap)
    if sequence_parallel is not None:
        out = tokens_for_heads(out, sequence_parallel)
    return out.unsqueeze(0), None


def _error(module: torch.nn.Module, what: str, remedy: str) -> ModelError:
    layer = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    return ModelError(f"{ATTENTION}: {layer} asks for {what}, which is not supported: {remedy}")


def _refuse_unsupported(
    module: torch.nn.Module, dropout: float, is_causal: bool, kwargs: dict[str, Any]
) -> None:
    if dropout > 0:
        raise _error(module, f"attention dropout {dropout}", "set attention_dropout to 0")
    if not is_causal:
        raise _error(module, "bidirectional attention", "use a causal language model")
    if kwargs.get("output_attentions"):
        raise _error(module, "output_attentions", "use attn_implementation='eager' for that")
    for name, given in kwargs.items():
        # Unknown tensors (s_aux, position_bias, indices, ...) would change the result.
        if isinstance(given, torch.Tensor) and name not in _HARMLESS:
            raise _error(
                module, f"{name!r}", "use a model without it, or attn_implementation='sdpa'"
            )


def _varlen_mask(
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """What transformers calls to build the mask: none at all unless padding or a cache needs it."""
    if use_vmap:
        raise ModelError(
            f"{ATTENTION}: the model overlays its own mask on the causal one, which is not "
            "supported: load it with attn_implementation='sdpa'"
        )
    whole = q_length == kv_length
    if whole and attention_mask is None:
        return None
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and whole,
        **kwargs,
    )


def _rows(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Every row one sequence: [B, H, L, D] -> [B, H, L, D_v]; `mask` [B, 1, L, L_kv] holds padding,
    cache offset and window when it is there."""
    if mask is not None:
        return _masked(q, k, v, mask, scaling, softcap)
    if q.shape[2] != k.shape[2]:
        raise _error(module, "a KV cache without a mask", "call the model through generate()")
    if position_ids is not None and bool((position_ids.diff(dim=-1) != 1).any()):
        raise _error(
            module,
            "position_ids that restart, without cu_seq_lens_q",
            "pass cu_seq_lens_q, cu_seq_lens_k and max_length_q for packed sequences",
        )
    return _causal(q, k, v, scaling, window, softcap)


def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention where `mask` (bool, broadcastable to [B, 1, L, L_kv]) is True."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True)
    groups = q.shape[1] // k.shape[1]
    scores = q.unflatten(1, (-1, groups)) @ k.unsqueeze(2).transpose(-1, -2) * scaling
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask.unsqueeze(-3), torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return (weights.to(q.dtype) @ v.unsqueeze(2)).flatten(1, 2)


def _causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of equally long sequences: [n, H, L, D] -> [n, H, L, D_v]."""
    length = q.shape[2]
    if softcap is None and (window is None or window >= length):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=True
        )
    blocks = []
    for start in range(0, length, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        distance = (
            torch.arange(start, stop, device=q.device)[:, None]
            - torch.arange(first, stop, device=q.device)[None, :]
        )
        mask = distance >= 0
        if window is not None:
            mask &= distance < window
        rows, columns = slice(start, stop), slice(first, stop)
        q_rows, keys, values = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        blocks.append(_masked(q_rows, keys, values, mask[None, None], scaling, softcap))
    return torch.cat(blocks, dim=2)


class _Buckets(NamedTuple):
    """How sequences of like length share one call; slots are rows of the padded layout."""

    shapes: tuple[tuple[int, int], ...]  # (sequences, padded length) per call
    token_of_slot: torch.Tensor  # int64 [S]; padding repeats its sequence's last token
    slot_of_token: torch.Tensor  # int64 [T]
    is_padding: torch.Tensor  # bool [S]


def _padded_length(length: int) -> int:
    """Next of four steps per octave (at least 16): depends on this sequence only."""
    if length >= _EXACT_LENGTH:
        return length
    step = max(16, (1 << length.bit_length()) >> 3)
    return -(-length // step) * step


@lru_cache(maxsize=4)
def _buckets(lengths: tuple[int, ...], device: torch.device) -> _Buckets:
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length
    members: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        if length:
            members.setdefault(_padded_length(length), []).append(i)
    tokens, padding = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.bool)]
    for padded, sequences in members.items():
        start = torch.tensor([starts[i] for i in sequences])[:, None]
        last = torch.tensor([lengths[i] - 1 for i in sequences])[:, None]
        column = torch.arange(padded)[None, :]
        tokens.append((start + torch.minimum(column, last)).flatten())
        padding.append((column > last).flatten())
    token_of_slot, is_padding = torch.cat(tokens), torch.cat(padding)
    slot_of_token = torch.empty(total, dtype=torch.int64)
    real = (~is_padding).nonzero().flatten()
    slot_of_token[token_of_slot[real]] = real
    return _Buckets(
        tuple((len(s), padded) for padded, s in members.items()),
        token_of_slot.to(device),
        slot_of_token.to(device),
        is_padding.to(device),
    )


class _ToSlots(torch.autograd.Function):
    """Packed [T, ...] -> padded [S, ...]. Gathers both ways: padding receives no gradient."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, buckets: _Buckets) -> torch.Tensor:
        ctx.buckets = buckets
        return packed.index_select(0, buckets.token_of_slot)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.buckets.slot_of_token), None


class _ToTokens(torch.autograd.Function):
    """Padded [S, ...] -> packed [T, ...]; the inverse of `_ToSlots`."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, buckets: _Buckets) -> torch.Tensor:
        ctx.buckets = buckets
        return slots.index_select(0, buckets.slot_of_token)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        slots = grad.index_select(0, ctx.buckets.token_of_slot)
        return slots.masked_fill_(ctx.buckets.is_padding[:, None, None], 0), None


def _packed_blocks(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """The block path: q [T, H, D], k and v [T, H_kv, D*] -> [T, H, D_v]."""
    edges = cu_seqlens.tolist()
    lengths = tuple(b - a for a, b in pairwise(edges))
    if edges[0] != 0 or edges[-1] != q.shape[0] or min(lengths, default=0) < 0:
        raise _error(
            module,
            f"cu_seq_lens_q {edges[:4]}...{edges[-1]} over {q.shape[0]} tokens",
            "cu_seqlens starts at 0, does not decrease and ends at the number of tokens",
        )
    dtype = q.dtype
    if q.device.type == "cpu":  # SDPA's backward in bfloat16 takes 1.6 times as long there
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    if len(lengths) == 1 and _padded_length(lengths[0]) == lengths[0]:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return _causal(q, k, v, scaling, window, softcap)[0].transpose(0, 1).to(dtype)
    buckets = _buckets(lengths, q.device)
    slots = [_ToSlots.apply(x, buckets) for x in (q, k, v)]
    outputs, first = [], 0
    for count, length in buckets.shapes:
        rows = slice(first, first + count * length)
        q, k, v = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in slots)
        outputs.append(_causal(q, k, v, scaling, window, softcap).transpose(1, 2).flatten(0, 1))
        first += count * length
    return _ToTokens.apply(torch.cat(outputs).to(dtype), buckets)


@lru_cache(maxsize=1)
def _flash_attn() -> Callable[..., torch.Tensor] | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _cuda_kernel(
    q: torch.Tensor, v: torch.Tensor, softcap: float | None
) -> Callable[..., torch.Tensor] | None:
    """A fused varlen kernel that takes these inputs, or None for the block path."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 256:
        return None
    if _flash_attn() is not None:
        return _flash_attn_kernel
    return _torch_kernel if softcap is None else None


def _flash_attn_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    kernel = _flash_attn()
    assert kernel is not None
    return kernel(
        q, k, v, cu_seqlens, cu_seqlens, max_length, max_length,
        softmax_scale=scaling, causal=True, softcap=softcap or 0.0,
        window_size=(-1, 0) if window is None else (window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def _torch_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_length, max_length, scale=scaling, enable_gqa=True,
        window_size=(-1, 0) if window is None else (window - 1, 0),
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out


AttentionInterface.register(ATTENTION, varlen_attention)
AttentionMaskInterface.register(ATTENTION, _varlen_mask)
