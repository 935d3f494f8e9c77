"""The calls of the baselines in CuTe-DSL, with stand-ins that have the packages' signatures."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import _cute
from benchmarks._baselines import available


def cross_entropy(
    x,
    target,
    lse_partial=None,
    weight=None,
    ignore_index=-100,
    reduction="mean",
    inplace_backward=False,
):
    assert lse_partial is None and weight is None
    return F.cross_entropy(x, target, ignore_index=ignore_index, reduction=reduction)


def linear_cross_entropy_func(
    x, weight, bias, target, ignore_index=-100, reduction="mean", inplace_backward=False
):
    assert bias is None
    return cross_entropy(F.linear(x, weight), target, None, None, ignore_index, reduction)


def chunked_linear_cross_entropy(
    x,
    weight,
    target,
    chunk_size=4096,
    ignore_index=-100,
    reduction="mean",
    **newer,
):
    return linear_cross_entropy_func(x, weight, None, target, ignore_index, reduction)


def lse_target_epi(a, b, store_d, target, tuned):
    assert not store_d and not tuned
    logits = a @ b
    return {"lse": logits.logsumexp(-1), "target_logit": logits.gather(1, target[:, None])[:, 0]}


def rmsnorm(
    x,
    weight=None,
    bias=None,
    residual=None,
    out_dtype=None,
    residual_dtype=None,
    eps=1e-6,
    **newer,
):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def gemm(
    A,
    B,
    out=None,
    bias=None,
    alpha=1.0,
    out_dtype=None,
    out_quant_dim=-1,
    out_transposed=False,
    out_per_tensor_scale=None,
    cu_seqlens_m=None,
    cu_seqlens_k=None,
    A_idx=None,
    batch_idx_permute=None,
    dynamic_scheduler=False,
    tuned=True,
    **newer,
):
    """[T, K] x [E, K, N], or [M, T] x [T, N], by groups of T."""
    assert not tuned and (cu_seqlens_m is None) != (cu_seqlens_k is None)
    if cu_seqlens_m is not None:
        parts = A.split(cu_seqlens_m.diff().tolist())
        return torch.cat([a @ b for a, b in zip(parts, B, strict=True)])
    sizes = cu_seqlens_k.diff().tolist()
    return torch.stack([a @ b for a, b in zip(A.split(sizes, 1), B.split(sizes), strict=True)])


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    **newer,
):
    assert causal and qv is None and window_size[1] in (0, None)
    if page_table is not None:
        parts = [
            (k[pages].flatten(0, 1)[:n], v[pages].flatten(0, 1)[:n])
            for pages, n in zip(page_table.long(), seqused_k.tolist(), strict=True)
        ]
        assert max_seqlen_q == 1 and cu_seqlens_q.tolist() == [*range(len(q) + 1)]
        return torch.cat([attend(q[i : i + 1], *part, None) for i, part in enumerate(parts)]), None
    assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
    sizes = cu_seqlens_q.diff().tolist()
    assert max(sizes) <= max_seqlen_q
    parts = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
    return torch.cat([attend(*part, window_size[0]) for part in parts]), None


def attend(q, k, v, left):
    """Causal attention of the last queries, each over `left` keys before its own, by softmax."""
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * q.shape[-1] ** -0.5
    distance = torch.arange(len(k))[-len(q) :, None] - torch.arange(len(k))
    unseen = (distance < 0) | (distance > (len(k) if left is None else left))
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(groups, 1))


MODULES = {
    "quack": {"cross_entropy": cross_entropy, "rmsnorm": rmsnorm},
    "quack.linear_cross_entropy": {
        "linear_cross_entropy_func": linear_cross_entropy_func,
        "chunked_linear_cross_entropy": chunked_linear_cross_entropy,
    },
    "quack.epilogue.library": {"lse_target_epi": lse_target_epi},
    "quack.gemm_interface": {"gemm": gemm},
    "flash_attn.cute": {"flash_attn_varlen_func": flash_attn_varlen_func},
}


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    for name, functions in MODULES.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))


def draw(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def check(result, exact, leaves):
    torch.testing.assert_close(result, exact)
    theirs, ours = (
        torch.autograd.grad(x.square().sum(), leaves, retain_graph=True) for x in (result, exact)
    )
    torch.testing.assert_close(theirs, ours)


def test_log_probs_and_cross_entropy_from_logits_and_hidden_states():
    hidden, weight, ids = draw(8, 5), draw(11, 5), torch.arange(8) % 11
    logits = (hidden @ weight.t()).detach().requires_grad_()
    log_p = logits.log_softmax(-1)[torch.arange(8), ids]
    check(_cute.log_probs()(logits, ids)[0], log_p, (logits,))
    exact = (hidden @ weight.t()).log_softmax(-1)[torch.arange(8), ids]
    check(_cute.log_probs_from_hidden()(hidden, weight, ids)[0], exact, (hidden, weight))
    fused = _cute.fused_log_probs_from_hidden()(hidden, weight, ids)
    torch.testing.assert_close(fused[0], exact)
    mean = _cute.cross_entropy_from_hidden()(hidden, weight, ids, "advantages", "old log-probs")
    check(mean, -exact.mean(), (hidden, weight))


@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_packed_sequences(window):
    q, k, v = draw(12, 4, 8), draw(12, 2, 8), draw(12, 2, 8)
    ends = torch.tensor([0, 6, 12], dtype=torch.int32)
    out = _cute.flash_attention_4()(q, k, v, ends, 6, window=window, deterministic=True)
    left = None if window is None else window - 1
    exact = [attend(q[part], k[part], v[part], left) for part in (slice(0, 6), slice(6, 12))]
    check(out, torch.cat(exact), (q, k, v))


def test_attention_of_one_token_over_pages():
    q, keys, values = draw(2, 4, 8), draw(6, 3, 2, 8), draw(6, 3, 2, 8)
    table = torch.tensor([[4, 0, 1], [2, 5, 3]], dtype=torch.int32)
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [7, 9]))
    out = _cute.paged_flash_attention_4()(q, keys, values, table, starts, lengths)
    for row, pages, length in zip(range(2), table.long(), lengths.tolist(), strict=True):
        k, v = (x[pages].flatten(0, 1)[:length] for x in (keys, values))
        torch.testing.assert_close(out[row : row + 1], attend(q[row : row + 1], k, v, None))


def test_norm_and_grouped_product(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    x, weight = draw(6, 8), draw(8)
    exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * weight
    check(_cute.rms_norm(1e-3)(x, weight), exact, (x, weight))
    x, weight, ends = draw(7, 4), draw(3, 5, 4), torch.tensor([0, 2, 2, 7], dtype=torch.int32)
    exact = torch.cat([x[:2] @ weight[0].t(), x[2:] @ weight[2].t()])
    check(_cute.grouped_product()(x, weight, ends), exact, (x, weight))


def test_a_package_that_breaks_at_import_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", SimpleNamespace())

    def changed():
        raise TypeError("epilogue depends on a logger")

    functions, missing = available(
        fa4=_cute.flash_attention_4, product=_cute.grouped_product, norm=changed
    )
    assert not functions and missing.keys() == {"fa4", "product", "norm"}
    assert missing["norm"] == "TypeError: epilogue depends on a logger"
    assert "gemm" in missing["product"]


@pytest.mark.parametrize("module", [name for name in MODULES if name != "quack.epilogue.library"])
def test_the_stand_ins_have_the_signatures_of_the_packages(module, monkeypatch):
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name)
    real = pytest.importorskip(module, exc_type=ImportError)
    for name, function in MODULES[module].items():
        known = [*inspect.signature(function).parameters]
        known = [name for name in known if name != "newer"]
        assert [*inspect.signature(getattr(real, name)).parameters][: len(known)] == known
    importlib.invalidate_caches()
