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
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from hybridengine.errors import ModelError
from hybridengine.kernels.packing.op import inverse_order
from hybridengine.model.ulysses import heads_for_tokens, tokens_for_heads

__all__ = ["ATTENTION", "varlen_attention"]

ATTENTION = "hybridengine_varlen"

_QUERY_BLOCK = 256  # rows of scores held at once where SDPA's causal flag is not enough
_EXACT_LENGTH = 512  # from here a sequence fills a call by itself: no padding to share one

# Tensors that models hand down to attention and that do not change its result.
_HARMLESS = {"num_items_in_batch", "seq_idx", "cache_position", "position_embeddings", "labels"}


class _Scores(NamedTuple):
    """How scores are made, whichever path makes them."""

    scaling: float
    window: int | None
    softcap: float | None


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    position_ids: Tensor | None = None,
    sequence_parallel: dist.ProcessGroup | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention: query [B, H, T, D], key and value [B, H_kv, T, D*] -> [B, T, H, D_v].

    Packed when `cu_seq_lens_q` (int32 [num_seqs + 1]) is given: then B is 1. H is a multiple of
    H_kv. Supports a sliding window, logit soft-cap and any scaling; differentiable. With
    `sequence_parallel`, T is this rank's part of the tokens that `cu_seq_lens_q` counts.

    Raises:
        ModelError: for anything else a layer asks for (attention sinks, dropout, position bias,
            bidirectional attention, ...), naming the layer and the feature.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Unknown tensors (s_aux, position_bias, indices, ...) would change the result.
    found = [n for n, x in kwargs.items() if isinstance(x, Tensor) and n not in _HARMLESS]
    unknown = ", ".join(map(repr, found))
    eager = "use attn_implementation='eager' for that"
    _refuse(
        module,
        (dropout > 0, f"attention dropout {dropout}", "set attention_dropout to 0"),
        (not causal, "bidirectional attention", "use a causal language model"),
        (kwargs.get("output_attentions"), "output_attentions", eager),
        (unknown, unknown, "use a model without it, or attn_implementation='sdpa'"),
    )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = _Scores(scaling, sliding_window, softcap)
    if cu_seq_lens_q is None:
        rows = _rows(module, query, key, value, attention_mask, position_ids, how)
        return rows.transpose(1, 2).contiguous(), None
    shapes = f"packed query {tuple(query.shape)} with key {tuple(key.shape)}"
    one_row = query.shape[0] == 1 and query.shape[2] == key.shape[2]
    alike = cu_seq_lens_k is None or cu_seq_lens_k is cu_seq_lens_q
    alike = alike or torch.equal(cu_seq_lens_k, cu_seq_lens_q)
    masked = attention_mask is not None
    _refuse(
        module,
        (masked, "an attention_mask beside cu_seq_lens_q", "pass one of the two"),
        (not one_row, shapes, "pack into one row [1, T], with use_cache=False"),
        (not alike, "cu_seq_lens_k unlike cu_seq_lens_q", "pass the same tensor for both"),
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if sequence_parallel is not None:
        q, k, v = heads_for_tokens(q, k, v, sequence_parallel)
    out = _fused(q, k, v, cu_seq_lens_q, max_length_q, how)
    if out is None:
        out = _packed_blocks(module, q, k, v, cu_seq_lens_q, how)
    if sequence_parallel is not None:
        out = tokens_for_heads(out, sequence_parallel)
    return out.unsqueeze(0), None


def _refuse(module: torch.nn.Module, *cases: tuple[Any, str, str]) -> None:
    """ModelError for the first of (whether it is so, what is asked for, what to do instead)."""
    for asked, what, remedy in cases:
        if asked:
            layer = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
            raise ModelError(
                f"{ATTENTION}: {layer} asks for {what}, which is not supported: {remedy}"
            )


def _varlen_mask(use_vmap: bool = False, **given: Any) -> Tensor | None:
    """What transformers calls to build the mask: none at all unless padding or a cache needs it."""
    if use_vmap:
        raise ModelError(
            f"{ATTENTION}: the model overlays its own mask on the causal one, which is not "
            "supported: load it with attn_implementation='sdpa'"
        )
    whole = given["q_length"] == given["kv_length"]
    if whole and given.get("attention_mask") is None:
        return None
    may_skip = given.get("allow_is_causal_skip", True) and whole
    return sdpa_mask(**given | {"allow_is_causal_skip": may_skip})


def _rows(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    position_ids: Tensor | None,
    how: _Scores,
) -> Tensor:
    """Every row one sequence: [B, H, L, D] -> [B, H, L, D_v]; `mask` [B, 1, L, L_kv] holds padding,
    cache offset and window when it is there."""
    if mask is not None:
        return _masked(q, k, v, mask, how)
    restarts = position_ids is not None and bool((position_ids.diff(dim=-1) != 1).any())
    cached = q.shape[2] != k.shape[2]
    lengths = "pass cu_seq_lens_q, cu_seq_lens_k and max_length_q for packed sequences"
    _refuse(
        module,
        (cached, "a KV cache without a mask", "call the model through generate()"),
        (restarts, "position_ids that restart, without cu_seq_lens_q", lengths),
    )
    return _causal(q, k, v, how)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: _Scores) -> Tensor:
    """Attention where `mask` (bool, broadcastable to [B, 1, L, L_kv]) is True."""
    if how.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=how.scaling, enable_gqa=True)
    groups = q.shape[1] // k.shape[1]
    scores = q.unflatten(1, (-1, groups)) @ k.unsqueeze(2).transpose(-1, -2) * how.scaling
    scores = how.softcap * torch.tanh(scores / how.softcap)
    scores = scores.masked_fill(~mask.unsqueeze(-3), torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return (weights.to(q.dtype) @ v.unsqueeze(2)).flatten(1, 2)


def _causal(q: Tensor, k: Tensor, v: Tensor, how: _Scores) -> Tensor:
    """Causal attention of equally long sequences: [n, H, L, D] -> [n, H, L, D_v]."""
    length, window = q.shape[2], how.window or q.shape[2]
    if how.softcap is None and window >= length:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=how.scaling, enable_gqa=True
        )
    places = torch.arange(length, device=q.device)
    blocks = []
    for start in range(0, length, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, length)
        seen = slice(max(0, start - window + 1), stop)
        distance = places[start:stop, None] - places[seen]
        mask = ((distance >= 0) & (distance < window))[None, None]
        blocks.append(_masked(q[:, :, start:stop], k[:, :, seen], v[:, :, seen], mask, how))
    return torch.cat(blocks, dim=2)


class _Buckets(NamedTuple):
    """How sequences of like length share one call; slots are rows of the padded layout."""

    shapes: list[tuple[int, int]]  # (sequences, padded length) per call
    token_of_slot: Tensor  # int64 [S], -1 for padding
    slot_of_token: Tensor  # int64 [T]


def _padded_length(length: int) -> int:
    """Next of four steps per octave (at least 16): depends on this sequence only."""
    if length >= _EXACT_LENGTH:
        return length
    step = max(16, (1 << length.bit_length()) >> 3)
    return -(-length // step) * step


@lru_cache(maxsize=4)
def _buckets(edges: tuple[int, ...], device: torch.device) -> _Buckets:
    members: dict[int, list[Tensor]] = {}
    for start, stop in pairwise(edges):
        padded = _padded_length(stop - start)
        tokens = F.pad(torch.arange(start, stop), (0, padded - (stop - start)), value=-1)
        members.setdefault(padded, []).append(tokens)
    token_of_slot = torch.cat([tokens for group in members.values() for tokens in group])
    return _Buckets(
        [(len(group), padded) for padded, group in members.items() if padded],
        token_of_slot.to(device),
        inverse_order(token_of_slot, edges[-1]).to(device),
    )


def _moved(rows: list[Tensor], index: Tensor, inverse: Tensor) -> list[Tensor]:
    """row[index] for each, zeros where that is -1, in one launch; and so its gradient."""
    zeros = [0] * len(rows)
    return torch.ops.hybridengine.move_rows(
        rows, index, inverse, None, 1, [index.numel()], list(map(float, zeros)), zeros, None
    )


def _packed_blocks(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, how: _Scores
) -> Tensor:
    """The block path: q [T, H, D], k and v [T, H_kv, D*] -> [T, H, D_v]."""
    edges = tuple(cu_seqlens.tolist())
    torn = edges[0] != 0 or edges[-1] != q.shape[0] or list(edges) != [*accumulate(edges, max)]
    wrong = f"cu_seq_lens_q {edges[:4]}...{edges[-1]} over {q.shape[0]} tokens"
    right = "cu_seqlens starts at 0, does not decrease and ends at the number of tokens"
    _refuse(module, (torn, wrong, right))
    dtype = q.dtype
    if q.device.type == "cpu":  # SDPA's backward in bfloat16 takes 1.6 times as long there
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    if len(edges) == 2 and _padded_length(edges[1]) == edges[1]:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return _causal(q, k, v, how)[0].transpose(0, 1).to(dtype)
    shapes, token_of_slot, slot_of_token = _buckets(edges, q.device)
    slots = _moved([q, k, v], token_of_slot, slot_of_token)
    outputs, first = [], 0
    for count, length in shapes:
        rows = slice(first, first + count * length)
        q, k, v = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in slots)
        outputs.append(_causal(q, k, v, how).transpose(1, 2).flatten(0, 1))
        first += count * length
    return _moved([torch.cat(outputs).to(dtype)], slot_of_token, token_of_slot)[0]


@lru_cache(maxsize=1)
def _flash_attn() -> Callable[..., Tensor] | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _fused(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int | None, how: _Scores
) -> Tensor | None:
    """A CUDA kernel's result; None where none takes these inputs, which is for the block path."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    flash = _flash_attn()
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 256 or (not flash and how.softcap is not None):
        return None
    longest = int(cu_seqlens.diff().max()) if max_length is None else max_length
    packed = (q, k, v, cu_seqlens, cu_seqlens, longest, longest)
    window = (-1 if how.window is None else how.window - 1, 0)
    if flash:
        return flash(
            *packed, softmax_scale=how.scaling, causal=True, window_size=window,
            softcap=how.softcap or 0.0, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(*packed, scale=how.scaling, enable_gqa=True, window_size=window)


AttentionInterface.register(ATTENTION, varlen_attention)
AttentionMaskInterface.register(ATTENTION, _varlen_mask)
