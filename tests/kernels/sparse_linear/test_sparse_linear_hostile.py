"""Bad input to sparse_linear_token_log_probs, and rows at the limits."""

import re

import pytest
import torch

from hybridengine.kernels.sparse_linear import op, sparse_linear_token_log_probs

HIDDEN, WEIGHT = torch.randn(3, 8), torch.randn(200, 8)
TOKENS, IDS, CU = torch.tensor([1, 5, 7]), torch.tensor([1, 4, 5, 6, 7]), torch.tensor([0, 1, 3, 5])


def call(hidden=HIDDEN, weight=WEIGHT, token_ids=TOKENS, kept_ids=IDS, cu_kept=CU, **options):
    return sparse_linear_token_log_probs(hidden, weight, token_ids, kept_ids, cu_kept, **options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"token_ids": torch.tensor([1, 5, 200])}, IndexError, "token_ids[2] is 200"),
        ({"kept_ids": torch.tensor([1, 4, 5, 6, 200])}, IndexError, "kept_ids[4] is 200"),
        ({"kept_ids": torch.tensor([1, 4, 5, 7, 6])}, ValueError, "[4] is 6, after 7 in row 2"),
        ({"kept_ids": torch.tensor([1, 5, 5, 6, 7])}, ValueError, "[2] is 5, after 5 in row 1"),
        ({"cu_kept": torch.tensor([0, 1, 1, 5])}, ValueError, "row 1 has no kept_ids"),
    ],
)
def test_an_error_names_the_argument(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(**arguments)


def test_one_kept_entry_is_certain():
    log_probs, entropy = call(
        token_ids=torch.tensor([1]), hidden=HIDDEN[:1], kept_ids=IDS[:1], cu_kept=CU[:2]
    )
    assert log_probs.item() == 0 and entropy.item() == 0


@pytest.mark.parametrize("offset", (-1e4, 1e4))
def test_rows_with_a_large_logit_offset(offset):
    bias = torch.full((200,), offset)
    torch.testing.assert_close(
        call(bias=bias), call(), rtol=0, atol=3e-3
    )  # float32 logits near 1e4


def test_infinite_and_nan_logits_stay_in_their_row():
    hidden = HIDDEN.clone()
    hidden[1] = torch.nan
    log_probs, entropy = call(hidden=hidden)
    assert log_probs.isnan().tolist() == [False, True, False] == entropy.isnan().tolist()
    bias = torch.zeros(200)
    bias[4] = -torch.inf  # row 1 keeps 4 and 5
    log_probs, entropy = call(bias=bias)
    assert log_probs[1] == 0 and entropy[1] == 0


def test_empty_batch():
    log_probs, entropy = call(HIDDEN[:0], WEIGHT, TOKENS[:0], IDS[:0], CU[:1])
    assert log_probs.shape == entropy.shape == (0,)


def test_unaligned_and_strided_inputs():
    hidden = torch.randn(3, 17)[:, 1:9]
    weight = torch.randn(8, 200).t()
    got = call(hidden, weight)
    torch.testing.assert_close(got, call(hidden.contiguous(), weight.contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize("outside", (-1, 200))
def test_unread_ids_outside_the_vocabulary_give_nan_in_the_dense_form(outside, monkeypatch):
    """As on a GPU, where the host does not read them."""
    expected, _ = call()
    monkeypatch.setattr(op, "DENSE_PART", 0)
    monkeypatch.setattr(op.check, "readable", lambda _: False)
    log_probs, entropy = call(kept_ids=torch.tensor([1, 4, outside, 6, 7]))
    assert log_probs.isnan().tolist() == [False, True, False] == entropy.isnan().tolist()
    torch.testing.assert_close(log_probs[::2], expected[::2])
