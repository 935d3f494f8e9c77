"""A stand-in for FlashAttention's two passes on a CPU, in float64; results of the inputs' dtype.

What FlashAttention leaves undefined is NaN here: rows of queries without keys, keys without
queries, and what lies beyond the longest run that the caller names.
"""

import torch

from hybridengine.kernels.attention.flash import FlashPair


def _runs(runs):
    ends_q, ends_k = runs.cu_seqlens_q.tolist(), runs.cu_seqlens_k.tolist()
    assert len(ends_q) == len(ends_k) and ends_q[0] == ends_k[0] == 0
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        assert a <= b and c <= d
        if a < b and c < d:
            assert b - a <= runs.max_seqlen_q and d - c <= runs.max_seqlen_k
            yield slice(a, b), slice(c, d)


def _scores(q, k, runs):
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(groups, 1))
    scores *= runs.softmax_scale
    if runs.causal:
        distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
        assert len(q) == len(k)
        unseen = (distance < 0) | (distance >= (runs.window_size or len(k)))
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores


def forward(query, key, value, runs):
    assert runs.cu_seqlens_q[-1] == len(query) and runs.cu_seqlens_k[-1] == len(key) == len(value)
    groups = query.shape[1] // key.shape[1]
    out = torch.full(query.shape, torch.nan, dtype=query.dtype)
    lse = torch.full((query.shape[1], len(query)), torch.nan)
    for rows, keys in _runs(runs):
        scores = _scores(query[rows], key[keys], runs)
        values = value[keys].double().repeat_interleave(groups, 1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
        lse[:, rows] = scores.logsumexp(-1).float()
    return out, lse


def backward(grad_out, query, key, value, out, lse, runs):
    assert lse.is_contiguous() and lse.shape == (query.shape[1], len(query))
    kv_heads = key.shape[1]
    groups = query.shape[1] // kv_heads
    grads = [torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (query, key, value)]
    for rows, keys in _runs(runs):
        q, grad, k, v = (x.double() for x in (query[rows], grad_out[rows], key[keys], value[keys]))
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        p = (_scores(q, key[keys], runs) - lse[:, rows, None].double()).exp()
        delta = (grad * out[rows].double()).sum(-1).T[..., None]
        d_scores = p * (torch.einsum("qhd,khd->hqk", grad, v) - delta) * runs.softmax_scale
        per_head = torch.einsum("hqk,qhd->khd", d_scores, q), torch.einsum("hqk,qhd->khd", p, grad)
        grads[0][rows] = torch.einsum("hqk,khd->qhd", d_scores, k).to(query.dtype)
        for total, part in zip(grads[1:], per_head, strict=True):
            total[keys] = part.unflatten(1, (kv_heads, groups)).sum(2).to(total.dtype)
    return tuple(grads)


PAIR = FlashPair(forward, backward)
