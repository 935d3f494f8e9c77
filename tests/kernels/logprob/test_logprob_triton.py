"""The Triton kernels of token_log_probs: in Triton's interpreter, and on a GPU if there is one."""

import pytest
import torch

from hybridengine.kernels import token_log_probs
from hybridengine.kernels.logprob import rows
from tests import tolerances
from tests.kernels.interpreter import run_interpreted
from tests.kernels.logprob.cases import (
    OPTIONS,
    move,
    options_for,
    plain_pytorch,
    problem,
    value_and_gradient,
)

pytest.importorskip("triton")

# Tests of the other modules that run in the interpreter, too (see conftest.py). Rows that the token
# leads by 30 have more than twice the error of plain PyTorch there (docs/exactness.md).
INTERPRETED = {
    "interpreted_logprob.py": [""],
    "test_logprob.py": [
        "::test_gradients_are_written_to_the_rows_of_row_index",
        "::test_only_the_requested_gradients",
        "::test_stats",
    ],
    "test_logprob_hostile.py": [
        "::test_a_removed_token_has_log_prob_minus_infinity",
        "::test_a_row_with_no_incoming_gradient_gets_exact_zeros",
        "::test_a_soft_cap_makes_infinite_logits_finite",
        "::test_gradient_of_the_token_as_p_goes_to_one",
        "::test_minus_infinity_removes_an_entry",
        "::test_nan_in_an_ignored_row_does_not_spread",
        "::test_no_distribution_gives_nan",
        "::test_no_tokens_and_all_ignored",
        "::test_non_contiguous_and_unaligned_rows",
        "::test_peaked_rows_have_at_most_twice_the_error_of_plain_pytorch",
        "::test_rows_with_a_large_logit_offset_are_as_exact_as_others",
    ],
}


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted(
        *(f"logprob/{module}{name}" for module, names in INTERPRETED.items() for name in names),
        "-k",
        "not reference and not bfloat16 and (not peaked_rows or 30.0-False or 17.0-True)",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("cuda", "triton"))
@pytest.mark.parametrize("option", OPTIONS)
def test_on_the_gpu(option, backend):
    logits, token_ids, gradients = problem(9, 4103, torch.float32, seed=0)
    options = options_for(option, 9, 4103, seed=0)
    exact = value_and_gradient(plain_pytorch, logits.double(), token_ids, gradients, **options)
    on_gpu = (logits.cuda(), token_ids.cuda(), gradients.cuda())
    got = value_and_gradient(token_log_probs, *on_gpu, backend=backend, **move(options, "cuda"))
    for e, g in zip(exact, got, strict=True):
        torch.testing.assert_close(g.cpu().double(), e, **tolerances.LOG_PROB, equal_nan=True)


def test_the_flag_of_bad_labels_is_not_made_in_a_capture(monkeypatch):
    monkeypatch.setattr(rows, "bad_labels", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"on cuda:0 is captured.*call it once before"):
        rows.bad_label_flag(torch.device("cuda", 0))
    assert not rows.bad_labels
