"""FlashAttention's two passes as one differentiable function, on a stand-in for the passes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridengine.kernels import tree_attention
from hybridengine.kernels.attention.flash import FlashPair
from hybridengine.kernels.attention.varlen import flash_attention
from tests.kernels.attention.flash_in_float64 import PAIR

ENDS = torch.tensor([0, 5, 6, 10], dtype=torch.int32)


def heads(rows=None, requires_grad=True):
    """q, k, v [10, H, 8], or [rows, H, 10 / rows, 8]."""
    torch.manual_seed(0)
    shapes = [(10, n, 8) if rows is None else (rows, n, 10 // rows, 8) for n in (4, 2, 2)]
    return [torch.randn(s, dtype=torch.float64, requires_grad=requires_grad) for s in shapes]


@pytest.mark.parametrize("rows", (1, 2))
@pytest.mark.parametrize("window", (None, 3))
def test_rows_have_the_results_of_their_tokens(window, rows):
    given = heads(rows)
    ends = torch.tensor([0, 5, 10], dtype=torch.int32)
    out = flash_attention(*given, ends, 5, 0.4, window, PAIR)
    flat = [x.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for x in given]
    expected = flash_attention(*flat, ends, 5, 0.4, window, PAIR)
    assert torch.equal(out, expected.unflatten(0, (rows, -1)))
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, given, grad)
    wanted = torch.autograd.grad(expected, flat, grad.flatten(0, 1))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other.unflatten(0, (rows, -1)).transpose(1, 2))


def test_only_what_the_backward_reads_is_saved():
    q, k, v = heads()
    out = flash_attention(q, k, v, ENDS, 5, 0.4, None, PAIR)
    saved = out.grad_fn.saved_tensors
    assert [x.shape for x in saved] == [q.shape, k.shape, v.shape, ENDS.shape, out.shape, (4, 10)]


def test_a_second_derivative_is_an_error():
    given = heads()
    grads = torch.autograd.grad(
        flash_attention(*given, ENDS, 5, 0.4, None, PAIR).sum(), given, create_graph=True
    )
    with pytest.raises(RuntimeError, match="flash_attention"):
        grads[0].sum().backward()


def test_torchs_passes_take_rows_of_a_gpu():
    with FakeTensorMode():
        q, k = (torch.empty(1, n, 10, 64, dtype=torch.bfloat16, device="cuda") for n in (4, 2))
        ends = torch.empty(4, dtype=torch.int32, device="cuda")
        for window in (None, 3):
            out = flash_attention(q, k, k, ends, 5, 0.4, window)
            assert out.shape == (1, 10, 4, 64) and out.dtype == q.dtype


def test_it_is_one_graph_for_the_compiler():
    def sequence(runs, tokens):
        return torch.searchsorted(runs.cu_seqlens_q[1:], torch.arange(tokens), right=True)

    def weights(q, k, runs):
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * runs.softmax_scale
        of, tokens = sequence(runs, q.shape[0]), torch.arange(q.shape[0])
        seen = (of[:, None] == of) & (tokens[:, None] >= tokens)
        return scores.masked_fill(~seen, -torch.inf)

    def forward(q, k, v, runs):
        scores = weights(q, k, runs)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(2, 1))
        return out, scores.logsumexp(-1)

    def backward(grad, q, k, v, out, lse, runs):
        p = (weights(q, k, runs) - lse[..., None]).exp()
        of_v = torch.einsum("hqk,qhd->khd", p, grad)
        d_p = torch.einsum("qhd,khd->hqk", grad, v.repeat_interleave(2, 1))
        d_scores = p * (d_p - (grad * out).sum(-1).T[..., None]) * runs.softmax_scale
        of_q = torch.einsum("hqk,khd->qhd", d_scores, k.repeat_interleave(2, 1))
        of_k = torch.einsum("hqk,qhd->khd", d_scores, q)
        return of_q, of_k.unflatten(1, (2, 2)).sum(2), of_v.unflatten(1, (2, 2)).sum(2)

    pair = FlashPair(forward, backward)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q, k, v, ends):
        return flash_attention(q, k, v, ends, 5, 0.4, None, pair)

    given = heads(1)
    out = attend(*given, ENDS)
    subtree_ends = ENDS[1:].repeat_interleave(ENDS.diff())
    expected = tree_attention(*given, subtree_ends, softmax_scale=0.4)
    grad = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, given, grad) for x in (out, expected))
    torch.testing.assert_close((out, *found), (expected, *wanted))
