"""tree_attention in plain PyTorch: the specification, and the oracle in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._per_token import compute_dtype

_QUERY_BLOCK = 256  # query tokens at a time, to bound the scores: [H, block, T]


class Heads(NamedTuple):
    """query [T, H, D], key [T, H_kv, D], value [T, H_kv, D_v]."""

    query: Tensor
    key: Tensor
    value: Tensor


class TreeOptions(NamedTuple):
    """Which keys a query sees, and how scores are computed: see `tree_attention`."""

    subtree_ends: Tensor
    position_ids: Tensor | None
    softmax_scale: float
    window_size: int | None
    softcap: float | None


def tree_attention_forward(
    heads: Heads, options: TreeOptions, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D_v] and the log-sum-exp of scores and sink, [H, T] float32 or float64."""
    query = heads.query
    q, k, v = _by_kv_head(heads)
    outs, sums = [], []
    for rows in _query_blocks(query):
        scores, _ = _scores(q[:, :, rows], k, options)
        visible = _visible(rows, options)
        scores = scores.masked_fill(~visible, -torch.inf)
        lse = scores.logsumexp(-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.unflatten(0, lse.shape[:2])[..., None])
        outs.append((scores - lse[..., None]).exp() @ v)
        sums.append(lse)
    out = torch.cat(outs, 2).flatten(0, 1).transpose(0, 1)
    return out.to(query.dtype).contiguous(), torch.cat(sums, 2).flatten(0, 1)


def tree_attention_backward(
    grad_out: Tensor, heads: Heads, out: Tensor, lse: Tensor, options: TreeOptions
) -> tuple[Heads, Tensor]:
    """Return the gradients of query, key and value, and delta [H, T]: grad_out . out."""
    query, key, _ = heads
    q, k, v = _by_kv_head(heads)
    groups = (key.shape[1], -1)
    d_out = grad_out.to(q.dtype).transpose(0, 1).unflatten(0, groups)
    # The gradient of a score is p (d_p - delta): delta = sum_k p_k d_p_k = d_out . out.
    delta = (d_out * out.to(q.dtype).transpose(0, 1).unflatten(0, groups)).sum(-1, keepdim=True)
    lse = lse.unflatten(0, groups)[..., None]
    grads_q, grad_k, grad_v = [], torch.zeros_like(k), torch.zeros_like(v)
    for rows in _query_blocks(query):
        scores, slope = _scores(q[:, :, rows], k, options)
        visible = _visible(rows, options)
        p = (scores - lse[:, :, rows]).exp().masked_fill(~visible, 0.0)
        grad = d_out[:, :, rows]
        grad_v += (p.transpose(-1, -2) @ grad).sum(1, keepdim=True)
        grad_scores = p * (grad @ v.transpose(-1, -2) - delta[:, :, rows]) * slope
        grads_q.append(grad_scores @ k)
        grad_k += (grad_scores.transpose(-1, -2) @ q[:, :, rows]).sum(1, keepdim=True)
    grad_q = torch.cat(grads_q, 2).flatten(0, 1)
    grads = grad_q, grad_k.flatten(0, 1), grad_v.flatten(0, 1)
    given = (grad.transpose(0, 1).to(query.dtype).contiguous() for grad in grads)
    return Heads(*given), delta.flatten(0, 1).squeeze(-1)


def _by_kv_head(heads: Heads) -> Heads:
    """Return query [H_kv, H / H_kv, T, D], key and value [H_kv, 1, T, D*], float32 or float64."""
    dtype = compute_dtype(heads.query)
    q, k, v = (x.to(dtype).transpose(0, 1) for x in heads)
    return Heads(q.unflatten(0, (k.shape[0], -1)), k.unsqueeze(1), v.unsqueeze(1))


def _query_blocks(query: Tensor) -> list[slice]:
    """Return the blocks of query tokens; an empty one if there are no tokens."""
    tokens = query.shape[0]
    return [slice(i, min(i + _QUERY_BLOCK, tokens)) for i in range(0, max(tokens, 1), _QUERY_BLOCK)]


def _scores(q: Tensor, k: Tensor, options: TreeOptions) -> tuple[Tensor, Tensor | float]:
    """Return the scores [..., T_q, T] and their derivative by q . k."""
    scale, softcap = options.softmax_scale, options.softcap
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is None:
        return scores, scale
    capped = torch.tanh(scores / softcap)
    return softcap * capped, scale * (1.0 - capped.square())


def _visible(rows: slice, options: TreeOptions) -> Tensor:
    """Return which keys the queries `rows` see, bool [T_q, T]."""
    ends, position_ids = options.subtree_ends, options.position_ids
    tokens = torch.arange(ends.shape[0], device=ends.device)
    queries = tokens[rows, None]
    visible = (tokens <= queries) & (queries < ends)
    if options.window_size is not None:
        assert position_ids is not None
        visible &= position_ids[rows, None] - position_ids < options.window_size
    return visible
