"""The products in the backward of linear_token_log_probs: active rows only; kept logits."""

import sys

import pytest
import torch

from hybridengine.kernels import linear_token_log_probs
from hybridengine.kernels.gemm import mixed_gemm
from hybridengine.kernels.linear.chunks import Chunks, logits_fit
from tests.kernels.linear.cases import (
    DEVICES,
    ROUNDED,
    assert_all_close,
    fused,
    gradients,
    problem,
    two_steps,
)

ROWS, WIDTH, VOCAB = 90, 16, 101
KEPT, CHUNKS = 2**20, 17 * (VOCAB * 6 + WIDTH * 8)  # budgets: all logits at once, several chunks


def zero_gradients(weights, token_ids):
    """Ignore some labels, and give other rows no gradient; return the number of active rows."""
    token_ids[::7] = -100
    weights[:, 10:40] = 0.0
    weights[0, 50:60] = 0.0  # of these the entropy has one
    return int(((token_ids != -100) & (weights != 0).any(0)).sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("budget_bytes", (KEPT, CHUNKS))
def test_rows_with_zero_gradient(budget_bytes, dtype, device):
    tensors, token_ids, weights = problem(ROWS, WIDTH, VOCAB, dtype=dtype)
    zero_gradients(weights, token_ids)
    exact = gradients(two_steps, tensors, token_ids, weights, dtype=torch.float64, softcap=20.0)
    got = gradients(
        fused, tensors, token_ids, weights, device, budget_bytes=budget_bytes, softcap=20.0
    )
    assert_all_close(got[:2], exact[:2])
    assert not got[2][10:40].any()
    for g, e in zip(got[2:], exact[2:], strict=True):
        size = e.abs().max()
        tolerance = ROUNDED if dtype == torch.bfloat16 else {"rtol": 0.0, "atol": 1e-5}
        torch.testing.assert_close(g.double() / size, e / size, **tolerance)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("budget_bytes", (KEPT, CHUNKS))
def test_number_of_rows_in_each_product(budget_bytes, dtype, monkeypatch):
    """2 T H V forward; 4 A H V backward for A active rows, and 2 A H V unless logits are kept."""
    tensors, token_ids, weights = problem(ROWS, WIDTH, VOCAB, dtype=dtype)
    active = zero_gradients(weights, token_ids)
    rows = {"logits": 0, "hidden_grad": 0, "weight_grad": 0}

    def product(out, a, b, bias=None, accumulate=False):
        if bias is not None:
            rows["logits"] += a.shape[0]
        mixed_gemm(out, a, b, bias, accumulate)

    def counting(name, argument):
        original = getattr(Chunks, name)

        def method(self, *arguments, **options):
            rows[name] += arguments[argument].shape[0]
            return original(self, *arguments, **options)

        monkeypatch.setattr(Chunks, name, method)

    for module in ("chunks", "logprob"):
        monkeypatch.setattr(
            sys.modules[f"hybridengine.kernels.linear.{module}"], "mixed_gemm", product
        )
    counting("hidden_grad", 0)
    counting("weight_grad", 1)
    gradients(fused, tensors, token_ids, weights, budget_bytes=budget_bytes)
    again = 0 if budget_bytes == KEPT else active
    assert rows == {"logits": ROWS + again, "hidden_grad": active, "weight_grad": active}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_kept_logits_and_the_buffer_of_their_gradient_fit_the_budget(dtype):
    for width, vocab in ((1024, 151_936), (576, 49_152), (8, 20)):
        weight = torch.empty(vocab, width, dtype=dtype, device="meta")
        for rows in (0, 1, 100, 217, 218, 600, 680, 700, 5000):
            hidden = torch.empty(rows, width, dtype=dtype, device="meta")
            if not logits_fit(hidden, weight, 2**28):
                assert rows * vocab * 8 > 0.9 * 2**28
                continue
            chunks = Chunks(hidden, weight, None, 2**28, False, rows, kept=True)
            assert chunks.logits_buffer.numel() == 0
            assert list(chunks.parts()) == [slice(0, rows)] * (rows > 0)
            assert chunks.grad_logits.shape[0] == rows
            assert rows * vocab * 4 + chunks.grad_logits.nbytes <= 2**28


@pytest.mark.parametrize("budget_bytes", (KEPT, CHUNKS))
def test_a_second_backward_gives_the_same_gradients(budget_bytes):
    tensors, token_ids, weights = problem(ROWS, WIDTH, VOCAB)
    leaves = [t.requires_grad_() for t in tensors]
    log_probs, entropy = fused(*leaves, token_ids, budget_bytes=budget_bytes)
    loss = (log_probs * weights[0] + entropy * weights[1]).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_is_kept_without_a_gradient():
    (hidden, weight, _), token_ids, _ = problem(ROWS, WIDTH, VOCAB)
    arguments = (1.0, None, 1.0, 0.0, -100, None, None, False, "", KEPT, False, None, "cpp")
    op = torch.ops.hybridengine.linear_token_log_probs
    for keep, shape in ((True, (ROWS, VOCAB)), (False, (0, 0))):
        assert op(hidden, weight, None, token_ids, *arguments, keep, False, None)[3].shape == shape
    weight.requires_grad_()
    sizes: list[int] = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.no_grad():
            linear_token_log_probs(hidden, weight, token_ids)
        assert not sizes
        linear_token_log_probs(hidden, weight, token_ids)
        assert ROWS * VOCAB in sizes
