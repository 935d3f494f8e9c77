"""Attention over a forest by FlashAttention: the calls, and how their results are joined."""

import inspect
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridengine.kernels import tree_attention
from hybridengine.kernels.attention import flash
from hybridengine.kernels.attention.flash import ATEN, Runs, cute_pair
from hybridengine.kernels.attention.flash_choice import flash_pair
from tests.kernels.attention.cases import forest_of, problem, random_forest
from tests.kernels.attention.flash_in_float64 import PAIR
from tests.kernels.attention.triton_cases import assert_exact
from tests.kernels.interpreter import run_interpreted

pytest.importorskip("triton")


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("attention/interpreted_cascade.py")


@pytest.mark.parametrize("window", (None, 3))
@pytest.mark.parametrize("causal", (True, False))
def test_torchs_operators_take_the_arguments(causal, window):
    """Traced without data: names, order and shapes; queries and keys of different lengths."""
    with FakeTensorMode():
        q = torch.empty(10, 4, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(10 if causal else 7, 2, 64, dtype=torch.bfloat16, device="cuda")
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        runs = Runs(ends, ends, 6, 5, causal, 0.1, window)
        out, lse = ATEN.forward(q, k, k, runs)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert lse.shape == (4, 10) and lse.dtype == torch.float32
        grads = ATEN.backward(out, q, k, k, out, lse, runs)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("window", (None, 3))
def test_flash_attention_4_gets_its_arguments(window):
    ends = torch.tensor([0, 6, 10], dtype=torch.int32)
    runs = Runs(ends, ends, 6, 6, True, 0.3, window)
    limits = (None, None) if window is None else (2, 0)

    def fwd(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse, **rest):
        assert return_lse and max_seqlen_q == max_seqlen_k == 6
        assert cu_seqlens_q is cu_seqlens_k is ends
        check(**rest)
        return *PAIR.forward(q, k, v, runs), None, None

    def check(softmax_scale, causal, window_size_left, window_size_right):
        assert softmax_scale == 0.3 and causal == (window is None)
        assert (window_size_left, window_size_right) == limits

    def bwd(q, k, v, out, dout, lse, *, cu_seqlens_q, cu_seqlens_k, deterministic, **rest):
        assert deterministic is False
        check(**rest)
        return PAIR.backward(dout, q, k, v, out, lse, runs)

    pair = cute_pair(SimpleNamespace(_flash_attn_fwd=fwd, _flash_attn_bwd=bwd))
    q, k, v = problem(forest_of(6, 4), 2, 1, 8).qkv
    out, lse = pair.forward(q, k, v, runs)
    grads = pair.backward(q, q, k, v, out, lse, runs)
    for got, expected in zip(grads, PAIR.backward(q, q, k, v, out, lse, runs), strict=True):
        assert torch.equal(got, expected)


def test_flash_attention_4_is_used_where_its_check_passes(monkeypatch):
    from hybridengine.kernels.attention import flash_choice

    capability, reason = [9], [None]
    module = SimpleNamespace(_flash_attn_fwd=None, _flash_attn_bwd=None)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability[0], 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(flash_choice, "why_wrong", lambda *_: reason[0])

    def chosen(size=64):
        flash_pair.cache_clear()
        return flash_pair(torch.device("cuda:0"), size)

    try:
        with warnings.catch_warnings(action="error"):
            assert chosen() is not ATEN
            assert chosen(256) is ATEN
            capability[0] = 8
            assert chosen() is ATEN
            capability[0] = 9
            monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
            assert chosen() is ATEN, "it is not installed"
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
        reason[0] = "grad_key of a check has a relative error of 2"
        with pytest.warns(RuntimeWarning, match="size 64 on GPU: grad_key .* remove it"):
            assert chosen() is ATEN
    finally:
        flash_pair.cache_clear()


def test_what_it_does_not_take_is_left_to_other_kernels():
    names = list(inspect.signature(flash.takes).parameters)
    with FakeTensorMode():
        half, narrow, odd = (
            torch.empty(5, 2, size, dtype=torch.bfloat16, device="cuda") for size in (64, 32, 4)
        )
        single = torch.empty(5, 2, 64, device="cuda")
        on_cpu = torch.empty(5, 2, 64, dtype=torch.bfloat16)
        given = dict(zip(names, (half, half, None, 0.1, None, None), strict=True))
        assert flash.takes(**given)
        others = [
            {"query": single, "value": single},
            {"query": on_cpu, "value": on_cpu},
            {"value": narrow},
            {"query": odd, "value": odd},
            {"sinks": torch.empty(2, device="cuda")},
            {"softmax_scale": -0.1},
            {"window_size": 4},
            {"softcap": 2.0},
        ]
        for other in others:
            assert not flash.takes(**given | other), other


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("aten", "chosen"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("dim", (64, 80, 128, 256))
def test_on_the_gpu(dim, dtype, name, monkeypatch):
    """Two levels; torch's FlashAttention 2, and what is chosen on this GPU."""
    if name == "aten":
        chosen = "hybridengine.kernels.attention.flash_forest.flash_pair"
        monkeypatch.setattr(chosen, lambda *_: ATEN)
    forest = forest_of((300, [(170, [40, 280, 1]), 60]), 130, (257, [90] * 8), (129, [1, 1]))
    assert_exact(problem(forest, 6, 2, dim, dtype=dtype), "cuda", dtype, scale=0.1, flash=True)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_random_forests_on_the_gpu(seed, monkeypatch):
    monkeypatch.setattr("hybridengine.kernels.attention.cascade_tables.MIN_KEYS", 0)
    case = problem(random_forest(1000, seed, longest=200), 4, 2, 64, dtype=torch.bfloat16)
    assert_exact(case, "cuda", torch.bfloat16, flash=True)


@pytest.mark.gpu
def test_the_same_bits_in_every_run_in_a_fixed_order():
    case = problem(forest_of((700, [300] * 5)), 8, 2, 64, dtype=torch.bfloat16)
    ends = case.forest.subtree_ends.cuda()
    leaves = [x.cuda().requires_grad_() for x in case.qkv]

    def step():
        out = tree_attention(*leaves, ends, flash=True)
        return out.detach(), *torch.autograd.grad(out, leaves, case.grad.cuda())

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first = step()
        for got, expected in zip(step(), first, strict=True):
            assert torch.equal(got, expected)
    finally:
        torch.use_deterministic_algorithms(False)
