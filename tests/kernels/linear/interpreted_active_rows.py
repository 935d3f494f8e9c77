"""Run by test_active_rows.py in Triton's interpreter."""

import sys

import numpy as np
import pytest
import torch
import triton.language as tl
from hybridengine.kernels.linear.active_rows import ActiveRowGradients
from hybridengine.kernels.linear.chunks import Chunks
from hybridengine.kernels.logprob import rows as logprob_rows
from hybridengine.kernels.logprob.options import row_options
from triton.runtime import interpreter

from tests import tolerances
from tests.kernels.linear.cases import (
    ROUNDED,
    assert_all_close,
    gradients,
    loss_and_gradients,
    loss_inputs,
    problem,
    two_steps,
)

ROWS, WIDTH, VOCAB = 150, 24, 197


@pytest.fixture(autouse=True)
def dot_of_bfloat16(monkeypatch):
    """The interpreter represents bfloat16 by its bits, and would multiply these."""

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, sums, *_):
        # Not matmul: in some BLAS kernels the sum of a row depends on its position in the tile.
        product = np.einsum("mk,kn->mn", wide(a), wide(b), dtype=sums.data.dtype)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def active_gradients(tensors, token_ids, weights, chunk_rows, wanted=(True, True, True)):
    """The gradients as the op computes them, with the row kernels of the extension."""
    options = row_options("test", token_ids, VOCAB)
    chunks = Chunks(*tensors, 128 * VOCAB * 16, False, True, active_rows=True)
    assert chunks.grad_logits.shape[0] == 128  # so a buffer holds several chunks
    chunks.rows = chunk_rows
    chunks.grad_logits.fill_(torch.nan)  # rows that are not written must not be read
    grads = ActiveRowGradients(chunks, token_ids, options, "cpp", wanted)
    for tensor in (grads.active_hidden, grads.partial, grads.weight):
        if tensor is not None:
            tensor.fill_(torch.nan)
    for rows in chunks.slices():
        logits, options_of_rows = grads.logits(rows), options.select(rows)
        results = logprob_rows.rows_forward(logits, token_ids[rows], options_of_rows, False, "cpp")
        grads.add_chunk(logits, rows, results[:4], *(w[rows].contiguous() for w in weights))
    return grads.finish()


@pytest.mark.parametrize(
    ("active", "dtype"),
    [
        *((active, torch.bfloat16) for active in (0, 1, 63, 64, 65, 127, 128, 129, ROWS)),
        *((65, dtype) for dtype in (torch.float32, torch.float16)),
    ],
)
def test_any_number_of_active_rows(active, dtype):
    """Around a block of the sum over rows (64), a tile of rows and the buffer (128)."""
    tensors, token_ids, weights = problem(ROWS, WIDTH, VOCAB, seed=active, dtype=dtype)
    inactive = torch.randperm(ROWS, generator=torch.Generator().manual_seed(active))[active:]
    weights[:, inactive] = 0
    expected = gradients(two_steps, tensors, token_ids, weights, dtype=torch.float64)[2:]
    got = active_gradients(tensors, token_ids, weights, chunk_rows=50)
    assert not got[0][inactive].any()
    if dtype == torch.float32:
        assert_all_close(got, expected)
    for g, e in zip(got, expected, strict=True):
        size = e.abs().max().clamp(min=1e-30)
        torch.testing.assert_close(g.double() / size, e / size, **ROUNDED)


def test_a_row_does_not_depend_on_which_others_are_active():
    tensors, token_ids, weights = problem(ROWS, WIDTH, VOCAB, dtype=torch.float16)
    full = active_gradients(tensors, token_ids, weights, 128)
    weights[:, ::3] = 0
    part = active_gradients(tensors, token_ids, weights, 50)
    active = torch.arange(ROWS) % 3 != 0
    assert torch.equal(part[0][active], full[0][active])


def test_only_the_requested_gradients_and_the_same_in_every_run():
    tensors, token_ids, weights = problem(ROWS, WIDTH, VOCAB, dtype=torch.float16)
    full = active_gradients(tensors, token_ids, weights, 50)
    for wanted in ((True, False, False), (False, True, False)):
        some = active_gradients(tensors, token_ids, weights, 50, wanted)
        for got, expected, want in zip(some, full, wanted, strict=True):
            assert torch.equal(got, expected) if want else got.numel() == 0


def test_a_row_whose_gradient_is_nan_is_active():
    tensors, token_ids, weights = problem(ROWS, WIDTH, VOCAB, dtype=torch.float16)
    weights[:] = 0
    weights[0, 5] = torch.nan
    hidden, weight, _ = active_gradients(tensors, token_ids, weights, 50)
    assert hidden[5].isnan().all()
    assert weight.isnan().any()
    assert not hidden[:5].any() and not hidden[6:].any()


def test_the_operator(monkeypatch):
    """Every kernel in Triton: rows, losses, products."""
    extra = {"entropy_coeff": 0.01, "kl_coef": 0.1}
    monkeypatch.setattr(
        sys.modules["hybridengine.kernels.linear.policy_loss"],
        "choose_backend", lambda op, device, requested, dtype: requested or "triton",
    )  # fmt: skip
    flag = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(logprob_rows, "_bad_label", lambda device: flag)
    monkeypatch.setattr(logprob_rows, "_backend_for", lambda logits, requested: requested)
    tensors, token_ids, _ = problem(60, 16, 101)
    arguments = loss_inputs(60)
    chunks = []
    add_chunk = ActiveRowGradients.add_chunk
    monkeypatch.setattr(
        ActiveRowGradients, "add_chunk", lambda self, *a: (chunks.append(1), add_chunk(self, *a))
    )
    got, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.float32, budget_bytes=25 * 101 * 8, **extra
    )
    assert len(chunks) > 2
    exact, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.float64, backend="reference", **extra
    )
    assert_all_close(got, exact, **tolerances.LINEAR)
