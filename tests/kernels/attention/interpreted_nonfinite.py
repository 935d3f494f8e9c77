"""Run by test_attention_triton.py in Triton's interpreter."""

import sys

import pytest
import torch

from tests.kernels.attention.nonfinite_cases import check
from tests.kernels.attention.paged_cases import Cache, Sequences, packed
from tests.kernels.interpreter import widen_dot


@pytest.fixture(autouse=True)
def triton_on_cpu_tensors(monkeypatch):
    widen_dot(monkeypatch)
    op = sys.modules["hybridengine.kernels.attention.op"]
    monkeypatch.setattr(op, "choose_backend", lambda *_: "triton")


@pytest.mark.parametrize(
    ("spoilt", "value", "token", "options"),
    [
        ("value", torch.nan, 15, {}),
        ("value", torch.inf, 30, {"window_size": 12}),
        ("value", -torch.inf, 5, {"softcap": 2.0}),
        ("key", torch.nan, 5, {}),
        ("key", torch.nan, 5, {"window_size": 12}),
        ("key", torch.inf, 35, {}),
        ("grad", torch.inf, 55, {}),
        ("query", torch.nan, 55, {"window_size": 12}),
    ],
)
def test_only_tokens_that_see_it(spoilt, value, token, options):
    check("cpu", torch.float32, token, spoilt, value, batch_invariant=True, **options)


def test_pages_have_the_bits_of_packed_sequences(monkeypatch):
    paged = sys.modules["hybridengine.kernels.paged_attention"]
    monkeypatch.setattr(paged, "choose_backend", lambda *_: "triton")
    case = Sequences.random([20, 1, 9], (2, 1), (16, 16), torch.float32)
    clean = packed(case)
    case.qkv[2][5, 0, 3] = torch.inf
    got = packed(case)
    affected = (torch.arange(30) >= 5) & (torch.arange(30) < 20)
    assert torch.equal(got[~affected], clean[~affected])
    assert got[affected].isnan().all()
    cached = Cache(case, 16).run(seed=1, longest=12)
    torch.testing.assert_close(cached, got, rtol=0, atol=0, equal_nan=True)
