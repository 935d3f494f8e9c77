"""16-bit products with a float32 result, by oneDNN and converted to float32, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine import kernels as he
from hybridengine.kernels import gemm as gemm_module
from hybridengine.kernels._backend import native
from hybridengine.kernels.gemm import mixed_gemm
from tests.kernels import contract
from tests.kernels.contract_inputs import IDS, draw

# Sums of at most 200 products of normal numbers in float32.
CLOSE = {"rtol": 0, "atol": 1e-4}


def stored(x: torch.Tensor, transposed: bool) -> torch.Tensor:
    return x.t().contiguous().t() if transposed else x


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@settings(deadline=None, max_examples=60)
@given(
    m=st.integers(0, 140),
    n=st.integers(0, 140),
    k=st.integers(1, 200),
    transposed=st.tuples(st.booleans(), st.booleans()),
    bias=st.booleans(),
)
def test_against_float64(dtype, m, n, k, transposed, bias):
    generator = torch.Generator().manual_seed(m * n + k)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    a, b = stored(draw(m, k), transposed[0]), stored(draw(n, k), transposed[1])
    added = draw(n) if bias else None
    expected = a.double() @ b.double().t()
    full = torch.full((m, n + 7), 5.0)
    out = full[:, 3 : 3 + n]  # a strided result; the rest must not change
    mixed_gemm(out, a, b, added)
    torch.testing.assert_close(out.double(), expected + (0 if added is None else added), **CLOSE)
    mixed_gemm(out, a, b, accumulate=True)
    torch.testing.assert_close(
        out.double(), 2 * expected + (0 if added is None else added), **CLOSE
    )
    assert (full[:, :3] == 5).all() and (full[:, 3 + n :] == 5).all()


@pytest.mark.skipif(
    not native().has_mixed_gemm(torch.bfloat16),
    reason="oneDNN has no 16-bit kernel for this CPU: the widened form runs instead",
)
def test_a_row_does_not_depend_on_other_rows():
    a, b = torch.randn(100, 1500).bfloat16(), torch.randn(130, 1500).bfloat16()
    full = torch.empty(100, 130)
    mixed_gemm(full, a, b)
    for rows in (slice(0, 1), slice(17, 60), slice(99, 100)):
        part = torch.empty(rows.stop - rows.start, 130)
        mixed_gemm(part, a[rows], b)
        assert torch.equal(part, full[rows])


@pytest.mark.parametrize("transposed", ((False, False), (True, False), (False, True), (True, True)))
@pytest.mark.parametrize(
    "dtypes", (("bfloat16",) * 2, ("float32", "float16"), ("float16", "float32"))
)
@pytest.mark.parametrize("sizes", ((5, 40, 16), (40, 5, 16), (5, 9, 100), (3, 4, 0)))
def test_widened_blocks(monkeypatch, sizes, dtypes, transposed):
    """The form of CPUs without 16-bit products: the larger operand is converted in blocks."""
    monkeypatch.setattr(gemm_module, "native", lambda: None)
    monkeypatch.setattr(gemm_module, "WIDENED_BYTES", 7 * 4 * 16)
    a, b = (
        stored(torch.randn(n, sizes[2]).to(getattr(torch, dtype)), flag)
        for n, dtype, flag in zip(sizes, dtypes, transposed, strict=False)
    )
    bias = torch.randn(sizes[1]).bfloat16()
    out = torch.empty(sizes[:2])
    mixed_gemm(out, a, b, bias)
    expected = a.double() @ b.double().t() + bias
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    mixed_gemm(out, a, b, accumulate=True)
    torch.testing.assert_close(out.double(), 2 * expected - bias.double(), **CLOSE)


def test_wrong_operands_are_refused():
    a = torch.zeros(4, 6, dtype=torch.bfloat16)
    product = native().mixed_gemm
    with pytest.raises(RuntimeError, match="no 16-bit kernel with a float32 result for float32"):
        product(a.float(), a.float(), None, torch.zeros(4, 4), False)
    if not native().has_mixed_gemm(a.dtype):
        return
    for b, bias, out, accumulate in (
        (a.half(), None, torch.zeros(4, 4), False),
        (a[:, :5], None, torch.zeros(4, 4), False),
        (a, None, torch.zeros(4, 5), False),
        (a, None, torch.zeros(4, 4, dtype=torch.bfloat16), False),
        (a, None, torch.zeros(4, 4).t()[::2], False),
        (a, torch.zeros(3), torch.zeros(4, 4), False),
        (a, torch.zeros(4), torch.zeros(4, 4), True),
        (a.repeat(2, 2)[::2, ::2], None, torch.zeros(4, 4), False),
    ):
        with pytest.raises(ValueError, match=r"mixed_gemm|bias"):
            product(a, b, bias, out, accumulate)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("bias_dtype", (None, torch.float32))
def test_operands_have_a_stride_of_1(monkeypatch, dtype, bias_dtype):
    """Those of a CPU with such products have stride 1 along a dimension, a bias is contiguous."""
    seen = []

    class Native:
        @staticmethod
        def mixed_gemm(a, b, bias, out, accumulate):
            assert 1 in a.stride() and 1 in b.stride()
            assert bias is None or (bias.is_contiguous() and bias.dtype == torch.float32)
            product = a.float() @ b.float().t() + (0 if bias is None else bias)
            out.copy_(out + product if accumulate else product)
            seen.append(out.shape)

        @staticmethod
        def has_mixed_gemm(_):
            return True

    hidden, weight, bias = draw(12, 16).to(dtype), draw(29, 16).to(dtype), draw(29)
    bias = bias.to(bias_dtype or dtype)
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), bias.double())
    expected = logits.log_softmax(1).gather(1, IDS[:, None])[:, 0]
    monkeypatch.setattr(gemm_module, "native", lambda: Native)
    for layout in (contract.spread, contract.transposed, contract.offset):
        out = torch.empty(12, 29)
        mixed_gemm(out, layout(hidden), layout(weight), contract.spread(bias))
        torch.testing.assert_close(out.double(), logits, rtol=1e-5, atol=1e-5)
        for rows in (12, 0):
            log_probs, _ = he.linear_token_log_probs(
                layout(hidden)[:rows], layout(weight), IDS[:rows], bias=contract.spread(bias)
            )
            torch.testing.assert_close(log_probs.double(), expected[:rows], rtol=1e-5, atol=1e-5)
    assert seen and gemm_module.keeps_16_bits(hidden)
