"""Run by test_unscaled_gradient.py in Triton's interpreter: the kernel against float64."""

import math
import sys

import pytest
import torch

from hybridengine.kernels.linear import chunks
from hybridengine.kernels.logprob import triton_unscaled
from hybridengine.kernels.logprob.options import row_options
from hybridengine.kernels.logprob.rows import rows_unscaled_gradient
from tests import tolerances
from tests.kernels.linear.cases import loss_and_gradients
from tests.kernels.logprob.cases import OPTIONS, options_for, plain_pytorch, problem

INF = math.inf
BLOCK = 64  # so that rows of a few hundred columns have several blocks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(triton_unscaled, "BLOCKS", (BLOCK, BLOCK))


def ours(logits, token_ids, dtype=torch.float32, **options):
    """log_probs, entropy and the gradient of log_probs with respect to the logits."""
    out = torch.full_like(logits, torch.nan, dtype=dtype)
    rows = row_options("test", token_ids, logits.shape[1], **options)
    log_probs, entropy, row_scale = rows_unscaled_gradient(logits, out, token_ids, rows)
    return log_probs, entropy, row_scale.double()[:, None] * out.double()


def of_plain_pytorch(logits, token_ids, **options):
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = plain_pytorch(leaf, token_ids, **options)
    finite = log_probs.where(log_probs.isfinite(), 0.0)
    return log_probs.detach(), entropy.detach(), torch.autograd.grad(finite.sum(), leaf)[0]


def assert_matches(logits, token_ids, got=None, **options):
    exact = of_plain_pytorch(logits.double(), token_ids, **options)
    got = got or ours(logits, token_ids, **options)
    for name, g, e in zip(("log_probs", "entropy"), got, exact, strict=False):
        torch.testing.assert_close(
            g.double(), e, **tolerances.LOG_PROB, equal_nan=True, msg=lambda m, n=name: n + m
        )
    has_token = exact[0].isfinite()
    torch.testing.assert_close(got[2][has_token], exact[2][has_token], **tolerances.LOG_PROB_GRAD)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (2, 2 * BLOCK), (3, 3 * BLOCK + 7)])
def test_against_float64(rows, vocab, option):
    logits, token_ids, _ = problem(rows, vocab, torch.float32, seed=0)
    assert_matches(logits, token_ids, **options_for(option, rows, vocab, seed=0))


LATE = {
    "a maximum 200 above": [200.0],
    "two of them": [200.0, 199.0],
    "just below the limit": [21.0],
    "just above the limit": [23.0],
    "overflow of float32": [89.0],
    "overflow of bfloat16's conversion": [88.72],
    "removed": [-INF, -INF],
}


@pytest.mark.parametrize("offset", (0.0, -1e4, 1e4))
@pytest.mark.parametrize("late", LATE)
def test_a_late_maximum(late, offset):
    """Columns after the first block, far above it and the token."""
    values = torch.tensor(LATE[late])
    logits = torch.randint(-3, 1, (4, 300), generator=torch.Generator().manual_seed(0)).float()
    logits[:, 200 : 200 + len(values)] = values
    logits[1, :BLOCK] = -INF  # with a token that is left
    logits[2, :BLOCK] = -INF  # and one that is removed: no first guess of the maximum
    token_ids = torch.tensor([5, 100, 3, 200])  # the last one is the maximum itself
    got = ours(logits + offset, token_ids)
    assert_matches(logits + offset, token_ids, got)
    if offset == 0 and "removed" not in late:
        as_bf16 = ours(logits, token_ids, torch.bfloat16)[2]
        assert as_bf16.isfinite().all()
        torch.testing.assert_close(as_bf16, got[2], rtol=2**-7, atol=1e-30)


def test_a_row_is_read_again_only_where_its_maximum_is_far(monkeypatch):
    """The exponentials of a row in `out` tell what they are relative to."""
    logits = torch.zeros(3, 300)
    logits[:, 250] = torch.tensor([10.0, 30.0, 30.0])
    token_ids = torch.tensor([0, 0, 250])
    out = torch.empty(3, 300)
    rows_unscaled_gradient(logits, out, token_ids, row_options("test", token_ids, 300))
    top = out[:, 1].log()
    torch.testing.assert_close(top, torch.tensor([0.0, -30.0, -30.0]))


def test_all_entries_equal():
    """Their number is no distance of the maximum: no entry is above the first block's."""
    logits, token_ids = torch.full((2, 300), -7.5), torch.tensor([0, 299])
    log_probs, entropy, gradient = ours(logits, token_ids)
    torch.testing.assert_close(log_probs, torch.full((2,), -math.log(300)))
    torch.testing.assert_close(entropy, torch.full((2,), math.log(300)))
    assert_matches(logits, token_ids, (log_probs, entropy, gradient))


@pytest.mark.parametrize("gap", (10.0, 17.0, 40.0, 80.0))
def test_gradient_of_the_token_as_p_goes_to_one(gap):
    """1 - p is the sum over the other entries, not a difference."""
    logits = torch.zeros(1, 150)
    logits[0, 140] = gap
    log_probs, _, gradient = ours(logits, torch.tensor([140]))
    others = 149 * math.exp(-gap)
    assert log_probs.item() == pytest.approx(-math.log1p(others), rel=2e-6)
    assert gradient[0, 140].item() == pytest.approx(others / (1 + others), rel=2e-6)


@pytest.mark.parametrize("token_is_peak", (False, True))
@pytest.mark.parametrize("gap", (1.0, 5.0, 17.0, 30.0))
def test_peaked_rows_have_at_most_twice_the_error_of_plain_pytorch(gap, token_is_peak):
    logits, token_ids, _ = problem(6, 303, torch.float32, seed=int(gap), scale=1.0)
    peak = token_ids if token_is_peak else 302 - token_ids
    logits.scatter_(1, peak[:, None], logits.amax(1, keepdim=True) + gap)
    exact = of_plain_pytorch(logits.double(), token_ids)
    plain, got = of_plain_pytorch(logits, token_ids), ours(logits, token_ids)
    for name, e, p, o in zip(("log_probs", "entropy", "grad"), exact, plain, got, strict=True):
        error, plain_error = ((v.double() - e).square().mean().sqrt() for v in (o, p))
        # The terms of the entropy are of the size of the distance from the first guess, 17 at most.
        floor = 17 * tolerances.ROUNDING if name == "entropy" else 0.0
        floor += 8 * tolerances.ROUNDING * e.square().mean().sqrt()
        assert error <= tolerances.ERROR_FACTOR * plain_error + floor, (name, error, plain_error)


def test_ignored_rows_are_not_read_and_become_zero():
    logits, token_ids, _ = problem(3, 200, torch.float32, seed=0)
    logits[1], token_ids[1] = torch.nan, -100
    log_probs, entropy, gradient = ours(logits, token_ids)
    assert log_probs[1] == 0 and entropy[1] == 0 and not gradient[1].any()
    rest = torch.tensor([0, 2])
    assert_matches(logits[rest], token_ids[rest], (log_probs[rest], entropy[rest], gradient[rest]))


@pytest.mark.parametrize("value", (math.nan, INF))
@pytest.mark.parametrize("column", (3, 150, 199))  # the first block, the last one, the token's
def test_what_is_no_distribution_is_visible(column, value):
    logits = torch.zeros(2, 200)
    logits[0, column] = value
    log_probs, _, gradient = ours(logits, torch.tensor([199, 199]))
    assert log_probs.isnan().tolist() == [True, False]
    assert gradient[0].isnan().any() and gradient[1].isfinite().all()


def test_a_row_of_removed_entries_is_visible():
    log_probs, entropy, gradient = ours(torch.full((1, 200), -INF), torch.tensor([7]))
    assert log_probs.isnan() and entropy.isnan() and gradient.isnan().any()


def test_a_bad_label_gives_nan_and_sets_the_flag(bad_label):
    log_probs, _, gradient = ours(torch.zeros(3, 5), torch.tensor([0, 7, -3]))
    assert log_probs.isnan().tolist() == [False, True, True]
    assert gradient.isnan().all(1).tolist() == [False, True, True]
    assert bad_label.item() == 1


def test_rows_of_a_buffer_with_padding():
    logits, token_ids, _ = problem(4, 131, torch.float32, seed=0)
    padded, out = torch.full((4, 136), torch.nan), torch.full((4, 144), 9.0)
    padded[:, :131] = logits
    options = row_options("test", token_ids, 131)
    results = rows_unscaled_gradient(padded[:, :131], out[:, :131], token_ids, options)
    expected = ours(logits, token_ids)
    assert torch.equal(results[0], expected[0]) and torch.equal(results[1], expected[1])
    assert torch.equal(results[2].double()[:, None] * out[:, :131].double(), expected[2])
    assert (out[:, 131:] == 9).all()


def test_certain_tokens_give_gradients_with_all_digits(monkeypatch):
    """The loss with the kernel. p near 1: the token's entry is the sum of the others, 1e-8."""
    generator = torch.Generator().manual_seed(0)
    hidden = 6 * torch.randn(10, 16, generator=generator)
    weight = torch.randn(101, 16, generator=generator)
    tensors = [t.bfloat16() for t in (hidden, weight, torch.zeros(101))]
    token_ids = (tensors[0].float() @ tensors[1].float().T).argmax(1)
    arguments, options = {"advantages": torch.ones(10)}, {"old_log_probs": None}
    exact, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float64, **options)
    module = sys.modules["hybridengine.kernels.linear.policy_gradient"]
    monkeypatch.setattr(chunks, "keeps_16_bits", lambda like: True)
    monkeypatch.setattr(module, "has_unscaled_gradient", lambda hidden, group: True)
    got, _ = loss_and_gradients(tensors, token_ids, arguments, torch.bfloat16, **options)
    assert exact[3].norm(dim=1).min() < 1e-6
    for g, e in zip(got[3], exact[3], strict=True):
        # The interpreter truncates to bfloat16 where a GPU rounds: twice the error.
        assert (g.double() - e).norm() <= 2**-6 * e.norm()
