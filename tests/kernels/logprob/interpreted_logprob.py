"""Run by test_logprob_triton.py in Triton's interpreter."""

import pytest
import torch

from hybridengine.kernels import token_log_probs
from hybridengine.kernels._backend import native
from hybridengine.kernels.logprob import triton as logprob_triton
from hybridengine.kernels.logprob.options import row_options
from hybridengine.kernels.logprob.rows import rows_backward, rows_forward
from tests import tolerances
from tests.kernels.logprob.cases import OPTIONS, assert_matches_float64, problem


@pytest.mark.parametrize("option", OPTIONS)
# The interpreter truncates float32 to bfloat16 instead of rounding; the GPU test covers that.
@pytest.mark.parametrize(
    ("rows", "vocab", "dtype"),
    [(1, 1, torch.float32), (5, 70, torch.float16), (3, 4103, torch.float32)],
)
def test_against_float64_in_the_interpreter(rows, vocab, dtype, option):
    assert_matches_float64("cpu", rows, vocab, dtype, option, seed=0)


def test_a_slice_of_the_vocabulary_has_the_sums_of_the_extension():
    logits, token_ids, _ = problem(3, 2100, torch.float32, seed=0)
    vocab_mask = torch.rand(3, 2100, generator=torch.Generator().manual_seed(0)) < 0.5
    token_ids[1] += 2100  # in the slice of another rank
    options = row_options("test", token_ids, 2100, 0.7, vocab_mask=vocab_mask)
    options = options._replace(vocab_range=torch.tensor([0, 4200]))
    flag = torch.zeros(1, dtype=torch.int32)
    (got,) = logprob_triton.forward(logits, token_ids, options, False, flag)
    expected = native().log_prob_partial(logits, token_ids, options.native(), flag)
    torch.testing.assert_close(got, expected, **tolerances.LOG_PROB)
    assert got[1, 3] == -torch.inf


def test_a_bad_label_gives_nan_and_sets_the_flag(bad_label):
    log_probs, _ = token_log_probs(torch.zeros(3, 5), torch.tensor([0, 7, -3]))
    assert log_probs.isnan().tolist() == [False, True, True]
    assert bad_label.item() == 1


@pytest.mark.parametrize("backend", ("triton", "cpp", "reference"))
def test_negative_log_probs_and_their_gradient(backend):
    logits, token_ids, gradients = problem(4, 70, torch.float32, seed=3)
    token_ids[2] = -100
    found = []
    for negate, of_log_probs in ((False, gradients[0]), (True, -gradients[0])):
        options = row_options("test", token_ids, 70, negate=negate)
        results = list(rows_forward(logits, token_ids, options, False, backend))
        given = results, of_log_probs, gradients[1], backend
        rows_backward(logits, out := torch.empty_like(logits), token_ids, options, *given)
        found.append((-results[0] if negate else results[0], *results[1:], out))
    for plain, negative in zip(*found, strict=True):
        assert torch.equal(plain, negative)
