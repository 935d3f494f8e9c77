"""The soft-cap by itself: engines apply it before they sample, trainers in `token_log_probs`."""

import pytest
import torch

from hybridengine.kernels import linear_token_log_probs, token_log_probs
from hybridengine.kernels.logprob.soft_cap import soft_cap_


@pytest.mark.parametrize("vocab", (1, 37, 2049, 5003))
@pytest.mark.parametrize("softcap", (0.7, 30.0))
def test_log_probs_have_the_bits_of_capped_logits(vocab, softcap):
    draw = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=draw) * 40
    logits[3] = -torch.inf  # becomes -softcap
    logits[4, vocab // 2] = torch.inf
    logits[5, vocab // 3] = torch.nan
    ids = torch.randint(0, vocab, (9,), generator=draw)
    capped = torch.cat([logits, logits], 1)[:, vocab:]  # rows of another stride
    soft_cap_(capped, softcap)
    for temperature in (1.0, 0.8, torch.linspace(0.5, 2, 9)):
        ours = token_log_probs(logits, ids, temperature, softcap=softcap)
        for one, other in zip(ours, token_log_probs(capped, ids, temperature), strict=True):
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    exact = softcap * torch.tanh(logits.double() / softcap)
    torch.testing.assert_close(capped.double(), exact, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_of_hidden_states():
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=draw) for n in (20, 300))
    ids = torch.randint(0, 300, (20,), generator=draw)
    given = {"deterministic": True, "softcap": 5.0}
    ours, _ = linear_token_log_probs(hidden, weight, ids, 0.8, **given)
    alone = [
        linear_token_log_probs(hidden[i : i + 1], weight, ids[i : i + 1], 0.8, **given)[0]
        for i in range(20)
    ]
    assert torch.equal(ours, torch.cat(alone))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="softcap is -1"):
        soft_cap_(torch.zeros(2, 3), -1.0)
    with pytest.raises(ValueError, match="logits"):
        soft_cap_(torch.zeros(2, 3).bfloat16(), 1.0)
