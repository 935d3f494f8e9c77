"""Run by test_active_rows.py in Triton's interpreter."""

import sys

import pytest
import torch
from hybridengine.kernels.linear.active_rows import ActiveRowGradients
from hybridengine.kernels.linear.chunks import Chunks
from hybridengine.kernels.logprob import rows as logprob_rows
from hybridengine.kernels.logprob.options import row_options

from tests import tolerances
from tests.kernels.interpreter import widen_dot
from tests.kernels.linear.cases import (
    ROUNDED,
    assert_all_close,
    fused,
    gradients,
    loss_and_gradients,
    loss_inputs,
    problem,
    two_steps,
)

ROWS, WIDTH, VOCAB = 150, 24, 197


@pytest.fixture(autouse=True)
def dot_of_bfloat16(monkeypatch):
    widen_dot(monkeypatch)


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


@pytest.fixture
def chunks(monkeypatch):
    """Run every kernel in Triton; the result has an entry per chunk of gradients."""
    for module in ("policy_loss", "logprob"):
        monkeypatch.setattr(
            sys.modules[f"hybridengine.kernels.linear.{module}"],
            "choose_backend", lambda op, device, requested, dtype: requested or "triton",
        )  # fmt: skip
    flag = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(logprob_rows, "_bad_label", lambda device: flag)
    monkeypatch.setattr(logprob_rows, "_backend_for", lambda logits, requested: requested)
    chunks = []
    add_chunk = ActiveRowGradients.add_chunk
    monkeypatch.setattr(
        ActiveRowGradients, "add_chunk", lambda self, *a: (chunks.append(1), add_chunk(self, *a))
    )
    return chunks


@pytest.mark.parametrize(("budget_bytes", "count"), [(25 * 101 * 8, 3), (2**20, 1)])
def test_log_probs(chunks, budget_bytes, count):
    """Several chunks, and kept logits; ignored labels, and rows with one zero gradient or two."""
    tensors, token_ids, weights = problem(60, 16, 101)
    token_ids[::7] = -100
    weights[:, 10:30], weights[0, 40:50] = 0.0, 0.0
    options = {"budget_bytes": budget_bytes, "backend": "triton"}
    got = gradients(fused, tensors, token_ids, weights, **options)
    assert len(chunks) >= count and (count > 1) is (len(chunks) > 1)
    exact = gradients(
        two_steps, tensors, token_ids, weights, dtype=torch.float64, backend="reference"
    )
    assert_all_close(got, exact, **tolerances.LINEAR)


def test_the_operator(chunks):
    extra = {"entropy_coeff": 0.01, "kl_coef": 0.1}
    tensors, token_ids, _ = problem(60, 16, 101)
    arguments = loss_inputs(60)
    got, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.float32, budget_bytes=25 * 101 * 8, **extra
    )
    assert len(chunks) > 2
    exact, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.float64, backend="reference", **extra
    )
    assert_all_close(got, exact, **tolerances.LINEAR)
