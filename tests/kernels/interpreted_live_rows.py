"""Run by test_linear_live_rows.py with TRITON_INTERPRET=1 set before any import."""

import sys

import numpy as np
import pytest
import torch
import triton.language as tl
from hybridengine.kernels.linear.active_rows import LiveRowGrads
from hybridengine.kernels.linear.logprob import Chunks
from hybridengine.kernels.logprob.op import rows_forward
from hybridengine.kernels.logprob.row_options import row_options
from triton.runtime import interpreter

from tests import tolerances
from tests.kernels.test_linear_logprob import (
    ROUNDED,
    assert_all_close,
    gradients,
    problem,
    two_steps,
)
from tests.kernels.test_linear_policy_loss import loss_and_gradients, loss_inputs

ROWS, WIDTH, VOCAB = 150, 24, 197


@pytest.fixture(autouse=True)
def dot_of_bfloat16(monkeypatch):
    """The interpreter keeps bfloat16 as the bits it is, and would multiply those."""

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, sums, *_):
        # Not matmul: in some of BLAS's kernels a row's sum depends on where in the tile it lies.
        product = np.einsum("mk,kn->mn", wide(a), wide(b), dtype=sums.data.dtype)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def live_gradients(tensors, token_ids, slopes, chunk_rows, wanted=(True, True, True)):
    """As the op goes about it, with the row kernels of the extension."""
    options = row_options("test", token_ids, VOCAB)
    chunks = Chunks(*tensors, 128 * VOCAB * 16, False, True, compact=True)
    assert chunks.gradient.shape[0] == 128  # and so a buffer holds several chunks
    chunks.size = chunk_rows
    chunks.gradient.fill_(torch.nan)  # what was never written may not be read
    grads = LiveRowGrads(chunks, wanted)
    for tensor in (grads.live_hidden, grads.partial, grads.weight):
        if tensor is not None:
            tensor.fill_(torch.nan)
    for rows in chunks.slices():
        logits = grads.logits(rows)
        found = rows_forward(logits, token_ids[rows], options.rows(rows), False, "cpp")[:4]
        part = [slope[rows].contiguous() for slope in slopes]
        grads.take(logits, rows, token_ids, options, found, part, "cpp")
    return grads.finished("")


@pytest.mark.parametrize(
    ("live", "dtype"),
    [
        *((live, torch.bfloat16) for live in (0, 1, 63, 64, 65, 127, 128, 129, ROWS)),
        *((65, dtype) for dtype in (torch.float32, torch.float16)),
    ],
)
def test_any_number_of_live_rows(live, dtype):
    """Around one block of the sum over rows (64), one tile of rows and the buffer (128)."""
    tensors, token_ids, slopes = problem(ROWS, WIDTH, VOCAB, seed=live, dtype=dtype)
    dead = torch.randperm(ROWS, generator=torch.Generator().manual_seed(live))[live:]
    slopes[:, dead] = 0
    expected = gradients(two_steps, tensors, token_ids, slopes, dtype=torch.float64)[2:]
    got = live_gradients(tensors, token_ids, slopes, chunk_rows=50)
    assert not got[0][dead].any()
    if dtype == torch.float32:
        assert_all_close(got, expected)
    for g, e in zip(got, expected, strict=True):
        size = e.abs().max().clamp(min=1e-30)
        torch.testing.assert_close(g.double() / size, e / size, **ROUNDED)


def test_a_row_does_not_depend_on_which_others_live():
    tensors, token_ids, slopes = problem(ROWS, WIDTH, VOCAB, dtype=torch.float16)
    whole = live_gradients(tensors, token_ids, slopes, 128)
    slopes[:, ::3] = 0
    part = live_gradients(tensors, token_ids, slopes, 50)
    kept = torch.arange(ROWS) % 3 != 0
    assert torch.equal(part[0][kept], whole[0][kept])


def test_only_the_gradients_asked_for_the_same_in_every_run():
    tensors, token_ids, slopes = problem(ROWS, WIDTH, VOCAB, dtype=torch.float16)
    whole = live_gradients(tensors, token_ids, slopes, 50)
    for wanted in ((True, False, False), (False, True, False)):
        some = live_gradients(tensors, token_ids, slopes, 50, wanted)
        for got, expected, want in zip(some, whole, wanted, strict=True):
            assert torch.equal(got, expected) if want else got.numel() == 0


def test_a_nan_among_the_slopes_is_not_taken_for_dead():
    tensors, token_ids, slopes = problem(ROWS, WIDTH, VOCAB, dtype=torch.float16)
    slopes[:] = 0
    slopes[0, 5] = torch.nan
    hidden, weight, _ = live_gradients(tensors, token_ids, slopes, 50)
    assert hidden[5].isnan().all()
    assert weight.isnan().any()
    assert not hidden[:5].any() and not hidden[6:].any()


def test_the_whole_operator(monkeypatch):
    """Every kernel in Triton: rows, losses, products."""
    extra = {"entropy_coeff": 0.01, "kl_coef": 0.1}
    kernels = sys.modules
    monkeypatch.setattr(
        kernels["hybridengine.kernels.linear.policy_loss"],
        "choose_backend", lambda op, device, requested: requested or "triton",
    )  # fmt: skip
    monkeypatch.setattr(
        kernels["hybridengine.kernels.logprob.op"],
        "_label_flag", lambda device: torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    monkeypatch.setattr(
        kernels["hybridengine.kernels.logprob.op"],
        "_backend_for", lambda logits, requested: requested,
    )  # fmt: skip
    tensors, token_ids, _ = problem(60, 16, 101)
    arguments = loss_inputs(60)
    taken = []
    original = LiveRowGrads.take
    monkeypatch.setattr(
        LiveRowGrads, "take", lambda self, *a: (taken.append(1), original(self, *a))
    )
    got, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.float32, budget_bytes=25 * 101 * 8, **extra
    )
    assert len(taken) > 2
    exact, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.float64, backend="reference", **extra
    )
    assert_all_close(got, exact, **tolerances.LINEAR)
