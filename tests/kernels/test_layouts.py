"""Every operator takes tensors of any strides: with and without rows, in every dtype."""

import pytest
import torch
from hybridengine.kernels.linear import chunks

from hybridengine import kernels as he
from tests.kernels.operator_cases import CASES, CU_KEPT, IDS, KEPT, draw

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def contiguous(tensor):
    return tensor.clone()


def spread(tensor):
    """Inner stride 2."""
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def transposed(tensor):
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def offset(tensor):
    """Rows that begin at unaligned addresses."""
    return torch.cat([tensor, tensor], -1)[..., 1 : 1 + tensor.shape[-1]]


def expanded(tensor):
    return tensor[:1].expand_as(tensor)


LAYOUTS = (spread, transposed, offset, expanded)


def results(name, inputs):
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = CASES[name][1](*leaves, backend=None)
    weights = [torch.linspace(1, 2, o.numel()).view(o.shape).to(o) for o in outputs]
    grads = torch.autograd.grad(outputs, leaves, weights)
    return [*(o.detach() for o in outputs), *grads]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("policy_loss", "value_loss")]
)
def test_strides_change_no_result(name, dtype):
    # Gradients of 16-bit products are rounded; other layouts may run other products.
    tolerance = {"rtol": 2**-6, "atol": 2**-6} if dtype.itemsize == 2 else {}
    tensors = [draw(*shape).to(dtype) for shape in CASES[name][0]]
    for layout in LAYOUTS:
        inputs = [layout(t) for t in tensors]
        expected = results(name, [t.contiguous() for t in inputs])
        for got, want in zip(results(name, inputs), expected, strict=True):
            torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_of_any_strides(dtype):
    """`contiguous()` leaves the strides of tensors without elements as they are."""
    empty = torch.empty(0, 16, dtype=dtype).as_strided((0, 16), (32, 2))
    logits = torch.empty(0, 29, dtype=dtype).as_strided((0, 29), (58, 2))
    weight, ids, floats = draw(29, 16).to(dtype), IDS[:0], torch.empty(0)
    heads = torch.empty(0, 2, 16, dtype=dtype).as_strided((0, 2, 16), (64, 32, 2))
    for function in (
        lambda x, h: he.token_log_probs(x, ids)[0],
        lambda x, h: he.token_entropy(x),
        lambda x, h: he.cross_entropy(x, ids, label_smoothing=0.1)[0],
        lambda x, h: he.linear_token_log_probs(h, weight, ids)[0],
        lambda x, h: he.linear_cross_entropy(h, weight, ids)[0],
        lambda x, h: he.linear_cross_entropy(h, weight, ids, reduction="none")[0],
        lambda x, h: he.linear_policy_loss(h, weight, ids, old_log_probs=floats, advantages=floats)[
            0
        ],
        lambda x, h: he.linear_distillation_loss(h, weight, empty, weight)[0],
        lambda x, h: he.sparse_linear_token_log_probs(h, weight, ids, KEPT[:0], CU_KEPT[:1])[0],
    ):
        x, h = (t.detach().requires_grad_() for t in (logits, empty))
        function(x, h).sum().backward()
        assert (x.grad is not None) != (h.grad is not None)
    q = heads.detach().requires_grad_()
    he.tree_attention(q, q, q, ids).sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("bias_dtype", (None, torch.float32))
def test_the_operands_of_16_bit_products(monkeypatch, dtype, bias_dtype):
    """Those of a CPU with such products have stride 1 along a dimension, a bias is contiguous."""
    from hybridengine.kernels import gemm as module

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
    monkeypatch.setattr(module, "native", lambda: Native)
    for layout in LAYOUTS[:3]:
        out = torch.empty(12, 29)
        module.mixed_gemm(out, layout(hidden), layout(weight), spread(bias))
        torch.testing.assert_close(out.double(), logits, rtol=1e-5, atol=1e-5)
        for rows in (12, 0):
            log_probs, _ = he.linear_token_log_probs(
                layout(hidden)[:rows], layout(weight), IDS[:rows], bias=spread(bias)
            )
            torch.testing.assert_close(log_probs.double(), expected[:rows], rtol=1e-5, atol=1e-5)
    assert seen and chunks.keeps_16_bits(hidden)


def test_a_dtype_is_named_once():
    with pytest.raises(ValueError, match=r"bias has dtype int64; expected float32: convert"):
        he.linear_token_log_probs(draw(12, 16), draw(29, 16), IDS, bias=torch.zeros(29).long())


@pytest.mark.parametrize("name", CASES)
def test_torch_func_is_refused_by_name(name):
    inputs = [draw(*shape) for shape in CASES[name][0]]
    loss = lambda *x: sum(o.sum() for o in CASES[name][1](*x, backend=None))  # noqa: E731
    op = {"token_entropy": "token_log_probs", "cross_entropy": "token_log_probs"}.get(name, name)
    op = op.partition(",")[0]
    named = f"{op}|token_log_probs: .* is inside a derivative of torch.func"
    with pytest.raises(NotImplementedError, match=named):
        torch.func.grad(loss)(*inputs)
