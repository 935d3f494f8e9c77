"""The CUDA log-prob kernels, compiled for the CPU: every block, warp and lane, and their joins.

There every exponential has the largest error that the GPU's has, 2 units in the last place.
"""

import ctypes
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels.logprob.options import row_options
from hybridengine.kernels.logprob.rows import native
from tests import tolerances
from tests.kernels.cuda_on_cpu import compile_for_cpu
from tests.kernels.logprob.cases import (
    DTYPES,
    OPTIONS,
    options_with_labels,
    plain_pytorch,
    problem,
    value_and_gradient,
)

pytestmark = pytest.mark.slow

DTYPE_NUMBER = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
INF = math.inf


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    check = Path(__file__).parent / "logprob_cuda_check.cpp"
    return compile_for_cpu("logprob/logprob_cuda.cu", check, tmp_path_factory.mktemp("logprob"))


def run(
    library,
    logits,
    token_ids,
    gradients,
    temperature=1.0,
    logit_scale=1.0,
    softcap=None,
    vocab_mask=None,
    squares=False,
    grad_dtype=None,
    vocab_range=None,
    partial=None,
    out=None,
):
    """Return log_probs, entropy, the gradient of the logits, [T, 3] of the row stats, bad_label."""
    rows, vocab = logits.shape
    results = torch.full((5 * rows,), 7.0)
    grad = torch.full((rows, vocab), 7.0, dtype=grad_dtype or logits.dtype) if out is None else out
    temperatures = torch.as_tensor(temperature, dtype=torch.float32).expand(rows).contiguous()
    gradients = gradients.float().contiguous()
    bad_label = torch.zeros(1, dtype=torch.int32)

    def pointer(tensor):
        return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())

    error = library.run_on_cpu(
        pointer(logits),
        *(ctypes.c_int64(n) for n in (logits.stride(0), rows, vocab)),
        ctypes.c_int(DTYPE_NUMBER[logits.dtype]),
        *(pointer(tensor) for tensor in (token_ids, vocab_range, vocab_mask, temperatures)),
        *(ctypes.c_double(logit_scale), ctypes.c_double(softcap or 0.0), ctypes.c_bool(squares)),
        *(pointer(tensor) for tensor in (gradients, results, partial, bad_label, grad)),
        *(ctypes.c_int(DTYPE_NUMBER[grad.dtype]), ctypes.c_int64(grad.stride(0))),
    )
    assert error == 0
    log_probs, entropy, *stats = results.view(5, rows)
    row_stats = torch.cat(stats).view(rows, 3)
    return log_probs, entropy, grad, row_stats, bad_label.item()


def exact(logits, token_ids, gradients, **options):
    return value_and_gradient(plain_pytorch, logits.double(), token_ids, gradients, **options)


def assert_close(got, expected, dtype):
    for g, e in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(g.double(), e, **tolerances.LOG_PROB)
    rounding = tolerances.GRAD_ROUNDING[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(
        got[2].double(),
        expected[2],
        rtol=tolerances.LOG_PROB_GRAD["rtol"] + rounding,
        atol=tolerances.LOG_PROB_GRAD["atol"] + (2.0**-24 if rounding else 0.0),
    )


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 5),
    vocab=st.one_of(st.integers(1, 70), st.integers(1000, 1100), st.integers(4000, 9000)),
    dtype=st.sampled_from(DTYPES),
    option=st.sampled_from(OPTIONS),
    seed=st.integers(0, 1000),
)
def test_against_float64(library, rows, vocab, dtype, option, seed):
    logits, token_ids, gradients = problem(rows, vocab, dtype, seed)
    options = options_with_labels(option, token_ids, vocab, seed=seed)
    got = run(library, logits, token_ids, gradients, **options)
    assert_close(got, exact(logits, token_ids, gradients, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_error_is_at_most_twice_that_of_plain_pytorch(library, option, dtype):
    logits, token_ids, gradients = problem(32, 5003, dtype, seed=3)
    options = options_with_labels(option, token_ids, 5003, seed=3)
    expected = exact(logits, token_ids, gradients, **options)
    plain = value_and_gradient(plain_pytorch, logits, token_ids, gradients, **options)
    ours = run(library, logits, token_ids, gradients, **options)
    for e, p, o in zip(expected, plain, ours, strict=False):
        error, plain_error = ((v.double() - e).square().mean().sqrt() for v in (o, p))
        assert error <= tolerances.ERROR_FACTOR * plain_error


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("token_is_peak", (False, True))
@pytest.mark.parametrize("gap", (1.0, 5.0, 17.0, 30.0))
def test_peaked_rows(library, gap, token_is_peak, dtype):
    """One entry is `gap` above all others: its exponential is exactly 1, theirs do not vanish."""
    logits, token_ids, _ = problem(32, 5003, torch.float32, seed=int(gap), scale=1.0)
    peak = token_ids if token_is_peak else token_ids.flip(0) - 1
    peak = peak.where(peak >= 0, 5002)
    logits.scatter_(1, peak[:, None], logits.amax(1, keepdim=True) + gap)
    logits, gradients = logits.to(dtype), torch.ones(2, 32)
    expected = exact(logits, token_ids, gradients)
    plain = value_and_gradient(plain_pytorch, logits, token_ids, gradients)
    ours = run(library, logits, token_ids, gradients)
    for e, p, o in zip(expected, plain, ours, strict=False):
        error, plain_error = ((v.double() - e).square().mean().sqrt() for v in (o, p))
        floor = tolerances.ROUNDING * e.square().mean().sqrt()
        assert error <= tolerances.ERROR_FACTOR * plain_error.clamp(min=floor)


def test_small_entries_next_to_a_peak_are_not_rounded_away(library):
    """Each is 2^-21 of the sum or less; added one by one, their rounding is 8 times as large."""
    logits, token_ids, gradients = problem(16, 5003, torch.float32, seed=14, scale=1.0)
    peak = (token_ids + 2500) % 5003
    logits.scatter_(1, peak[:, None], logits.amax(1, keepdim=True) + 14)
    entropy = run(library, logits, token_ids, gradients)[1].double()
    expected = exact(logits, token_ids, gradients)[1]
    assert ((entropy - expected).abs().mean() / expected.mean()).item() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alignment_does_not_matter(library, dtype):
    """A lane holds the same columns of a row at any address."""
    logits, token_ids, gradients = problem(3, 5001, dtype, seed=1)
    results = []
    for offset in range(8):
        place = torch.zeros(3 * 5008 + 16, dtype=dtype)
        place = place[(-place.data_ptr() // place.element_size()) % 16 :]
        view = place[offset : offset + 3 * 5008].view(3, 5008)[:, :5001]
        view.copy_(logits)
        results.append(run(library, view, token_ids, gradients))
    for other in results[1:]:
        for o, first in zip(other[:3], results[0][:3], strict=True):
            assert torch.equal(o, first)
    assert_close(results[0], exact(logits, token_ids, gradients), dtype)


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", (None, torch.bfloat16), ids=str)
def test_a_gradient_at_any_address(library, grad_dtype, dtype, in_place):
    """Rows of an odd vocabulary: every element of the gradient is written, and nothing else."""
    grad_dtype = grad_dtype or dtype
    if grad_dtype != dtype and (dtype != torch.float32 or in_place):
        return
    logits, token_ids, gradients = problem(3, 5001, dtype, seed=1)
    expected = run(library, logits, token_ids, gradients, grad_dtype=grad_dtype)[2]
    for offset in range(8):
        place = torch.full((3 * 5003 + 32,), 7.0, dtype=grad_dtype)
        rows = place[16 + offset :][: 3 * 5003].view(3, 5003)
        out = rows[:, :5001]
        if in_place:
            out.copy_(logits)
        run(library, out if in_place else logits, token_ids, gradients, out=out)
        assert torch.equal(out, expected)
        around = torch.cat([place[: 16 + offset], rows[:, 5001:].flatten(), rows[-1:, -1]])
        assert (around == 7).all() and (place[16 + offset + 3 * 5003 :] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_token_in_any_place(library, dtype):
    """The first and last columns of groups, loads, chunks, slices and rows."""
    places = [0, 3, 7, 8, 127, 128, 255, 256, 511, 512, 1023, 1024, 4095, 4096, 8191, 8192, 8400]
    logits, _, gradients = problem(len(places), 8401, dtype, seed=2)
    token_ids = torch.tensor(places)
    logits.scatter_(1, token_ids[:, None], 20.0)  # left among the others, it would be p
    assert_close(
        run(library, logits, token_ids, gradients), exact(logits, token_ids, gradients), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("squares", (False, True))
def test_nan_and_infinity_show_wherever_they_are(library, squares, dtype):
    places = [0, 1, 9, 255, 1023, 1024, 4095, 4096, 4999]
    logits, token_ids, gradients = problem(len(places), 5000, dtype, seed=3)
    rows = torch.arange(len(places))
    for value in (math.nan, INF):
        bad = logits.clone()
        bad[rows, places] = value
        bad[:, ::7] = torch.where(bad[:, ::7].isfinite(), -INF, bad[:, ::7])  # removed entries
        log_probs, entropy, *_ = run(library, bad, token_ids, gradients, squares=squares)
        assert log_probs.isnan().all() and entropy.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", (0.0, -1e4, 1e4))
def test_removed_entries(library, level, dtype):
    """-inf removes an entry, also where all of a lane, a chunk or a slice is removed."""
    logits = torch.full((3, 9000), -INF)
    logits[0, 4096:] = torch.randn(4904, generator=torch.Generator().manual_seed(0))
    logits[1, 8999], logits[1, 17], logits[2, 5] = 1.0, 0.5, 2.0
    logits, token_ids = (logits + level).to(dtype), torch.tensor([5000, 17, 5])
    got = run(library, logits, token_ids, torch.ones(2, 3))
    assert_close(got, exact(logits, token_ids, torch.ones(2, 3)), dtype)
    assert not got[2][logits == -INF].any()
    nothing = torch.full((1, 5000), -INF, dtype=dtype)
    log_probs, entropy, *_ = run(library, nothing, torch.tensor([3]), torch.ones(2, 1))
    assert log_probs.isnan() and entropy.isnan()


@pytest.mark.parametrize("grad_dtype", (torch.bfloat16, torch.float16), ids=str)
def test_a_16_bit_gradient_of_float32_logits(library, grad_dtype):
    logits, token_ids, gradients = problem(4, 2300, torch.float32, seed=4)
    got = run(library, logits, token_ids, gradients, grad_dtype=grad_dtype)
    assert_close(got, exact(logits, token_ids, gradients), grad_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_in_place_of_the_logits(library, dtype):
    logits, token_ids, gradients = problem(3, 5001, dtype, seed=8)
    expected = run(library, logits, token_ids, gradients)[2]
    run(library, logits, token_ids, gradients, out=logits)
    assert torch.equal(logits, expected)


def test_sum_of_squares_and_maximum(library):
    logits, token_ids, gradients = problem(4, 5003, torch.bfloat16, seed=5)
    given = library, logits, token_ids, gradients
    row_stats = run(*given, temperature=0.5, squares=True)[3].double()
    z = logits.double() / 0.5
    torch.testing.assert_close(
        row_stats[:, 2], z.softmax(-1).square().sum(-1), **tolerances.LOG_PROB
    )
    assert torch.equal(row_stats[:, 0], logits.double().amax(-1))


def test_ignored_rows_and_bad_labels(library):
    logits, _, _ = problem(4, 5003, torch.bfloat16, seed=6)
    logits[0] = math.nan
    token_ids, gradients = torch.tensor([-100, 5003, 7, 5002]), torch.ones(2, 4)
    gradients[:, 2] = 0
    log_probs, entropy, grad, _, bad_label = run(library, logits, token_ids, gradients)
    assert bad_label == 1
    assert log_probs[0] == entropy[0] == 0 and not grad[0].any()
    assert log_probs[1].isnan() and entropy[1].isnan()
    assert not grad[2].any()
    good = (logits[2:], token_ids[2:], gradients[:, 2:])
    expected = exact(*good)
    assert_close((log_probs[2:], entropy[2:], grad[2:]), expected, torch.bfloat16)
    assert run(library, *good)[4] == 0


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("vocab", (0, 1, 4500))
def test_sums_of_a_slice_of_the_vocabulary(library, vocab, masked):
    """As on the CPU; tokens in the slice, before and after it, and an ignored one."""
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(7))
    vocab_mask = torch.zeros(5, vocab, dtype=torch.bool) if masked else None
    vocab_range = torch.tensor([10, 10 + vocab + 5])
    token_ids = torch.tensor([10, 9, 10 + vocab - 1, 10 + vocab, -100])
    options = row_options("test", token_ids, vocab, vocab_mask=vocab_mask)
    options = options._replace(vocab_range=vocab_range)
    partial = torch.full((5, 5), 7.0)
    run(
        library,
        logits,
        token_ids,
        torch.ones(2, 5),
        vocab_mask=vocab_mask,
        vocab_range=vocab_range,
        partial=partial,
    )
    expected = native().log_prob_partial(logits, token_ids, options.native(), None)
    torch.testing.assert_close(partial, expected, rtol=2e-6, atol=2e-6)
