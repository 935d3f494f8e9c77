"""Run by test_logprob_triton.py with TRITON_INTERPRET=1 set before any import."""

import pytest
import torch
from hybridengine.kernels import token_log_probs
from hybridengine.kernels.logprob import op as logprob
from hybridengine.kernels.logprob import triton as logprob_triton

from tests import tolerances
from tests.kernels import test_logprob as plain
from tests.kernels import test_logprob_hostile as hostile


@pytest.fixture(autouse=True)
def triton_on_the_cpu(monkeypatch):
    flag = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(logprob, "_label_flag", lambda device: flag)
    monkeypatch.setattr(
        logprob,
        "_backend_for",
        lambda logits, requested: "reference" if logits.dtype == torch.float64 else "triton",
    )
    return flag


@pytest.mark.parametrize("option", plain.OPTIONS)
# The interpreter cuts float32 off to bfloat16 instead of rounding; the GPU test covers that.
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (5, 70), (3, 4103)])
def test_against_float64(rows, vocab, dtype, option):
    plain.test_against_float64.hypothesis.inner_test("cpu", rows, vocab, dtype, option, seed=0)


@pytest.mark.parametrize("gap", (10.0, 17.0, 40.0, 90.0))
def test_p_to_one(gap):
    hostile.test_gradient_of_the_token_as_p_goes_to_one(gap, "cpu", torch.float32)


@pytest.mark.parametrize("level", (-1e4, 1e4))
def test_far_rows(level):
    hostile.test_rows_far_from_zero_are_as_exact_as_others(level, "cpu")


@pytest.mark.parametrize(("gap", "token_leads"), [(30.0, False), (17.0, True)])
def test_led_rows(gap, token_leads):
    test = hostile.test_led_rows_keep_to_the_error_of_plain_pytorch
    test(gap, token_leads, torch.float32, "cpu")


def test_hostile_rows():
    hostile.test_minus_infinity_is_a_removed_entry("cpu", None)
    hostile.test_a_removed_token_has_log_prob_minus_infinity("cpu", None)
    hostile.test_nan_in_an_ignored_row_stays_there("cpu", None)
    hostile.test_a_row_with_no_incoming_gradient_gets_exact_zeros("cpu", None)
    hostile.test_no_tokens_and_all_ignored("cpu", None)
    hostile.test_non_contiguous_and_unaligned_rows(torch.float32, "cpu")
    for masked in (False, True):
        hostile.test_a_soft_cap_makes_infinite_logits_finite(masked, "cpu", None)
    for row in ([torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf]):
        hostile.test_no_distribution_gives_nan(row, "cpu", None)


def test_a_slice_of_the_vocabulary_sums_as_the_extension_does():
    logits, token_ids, _ = plain.problem(3, 2100, torch.float32, seed=0)
    keep = torch.rand(3, 2100, generator=torch.Generator().manual_seed(0)) < 0.5
    token_ids[1] += 2100  # another rank's
    options = logprob.row_options("test", token_ids, 2100, 0.7, keep_mask=keep)
    options = options._replace(vocab_range=torch.tensor([0, 4200]))
    flag = torch.zeros(1, dtype=torch.int32)
    (got,) = logprob_triton.forward(logits, token_ids, options, False, flag)
    expected = logprob.native().log_prob_partial(logits, token_ids, options.native(), flag)
    torch.testing.assert_close(got, expected, **tolerances.LOG_PROB)
    assert got[1, 3] == -torch.inf


def test_places():
    plain.test_gradients_go_to_the_places_given(torch.float16, "cpu")


def test_stats_and_single_gradients():
    plain.test_stats("cpu")
    plain.test_only_the_gradients_asked_for("cpu")


def test_a_bad_label_gives_nan_and_sets_the_flag(triton_on_the_cpu):
    log_probs, _ = token_log_probs(torch.zeros(3, 5), torch.tensor([0, 7, -3]))
    assert log_probs.isnan().tolist() == [False, True, True]
    assert triton_on_the_cpu.item() == 1
