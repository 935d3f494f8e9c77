"""sample_tokens: arguments that are refused, rows that cannot be sampled, extreme values."""

import pytest
import torch

from hybridengine.kernels import sample_tokens
from tests.kernels.sampling.cases import check_rows, keys, random_logits, sample

BACKENDS = ("cpp", "reference")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parameters", ({}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0}))
def test_rows_that_cannot_be_sampled(parameters, backend):
    """They do not spread to other rows."""
    logits = random_logits(6, 700)
    expected = sample(logits, *keys(6), backend, **parameters)
    logits[0], logits[1, 600], logits[2, 0], logits[3, 5] = (
        -torch.inf,
        torch.nan,
        torch.inf,
        -torch.nan,
    )
    got = sample(logits, *keys(6), backend, **parameters)
    assert got.tokens[:4].tolist() == [0] * 4 and got.num_kept[:4].tolist() == [0] * 4
    assert got.log_probs[:4].isnan().all()
    for one, want in zip(got[:3], expected[:3], strict=True):
        assert torch.equal(one[4:], want[4:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parameters", ({}, {"top_p": 0.5}, {"top_k": 2, "min_p": 0.5}), ids=str)
@pytest.mark.parametrize("size", (1e-44, 1e-20, 1e30, 3e38))
@pytest.mark.parametrize("temperature", (1.0, 1e-5))
def test_extreme_logits(size, temperature, parameters, backend):
    """Where logit / temperature leaves float32, too."""
    logits = random_logits(4, 300).clamp(-1, 1) * size
    parameters = parameters | {"temperature": temperature}
    for some in (logits, -logits.abs() - size / 8):
        sampled = sample(some, *keys(4), backend, **parameters)
        check_rows(sampled, some, *keys(4), **parameters)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", (1e-5, 1e-3, 1e6, 1e30))
def test_extreme_temperatures(temperature, backend):
    logits = random_logits(4, 300)
    for parameters in ({}, {"top_p": 0.5}, {"top_k": 20}, {"min_p": 0.9}):
        parameters = {**parameters, "temperature": temperature}
        sampled = sample(logits, *keys(4), backend, **parameters)
        check_rows(sampled, logits, *keys(4), **parameters)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits(backend):
    logits = torch.full((1, 1000), -7.0)
    for parameters, count in (({"top_k": 3}, 1000), ({"top_p": 0.5}, 500), ({"min_p": 1.0}, 1000)):
        sampled = sample(logits, *keys(1), backend, **parameters)
        assert sampled.num_kept.tolist() == [count]
        assert torch.equal(sampled.kept_ids, torch.arange(count, dtype=torch.int32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_of_the_largest_logits_is_the_greedy_token(backend):
    logits = random_logits(3, 2000).clamp(max=2.0)
    sampled = sample(logits, *keys(3), backend, temperature=0.0)
    assert torch.equal(sampled.tokens, logits.argmax(1))
    assert torch.equal(sampled.tokens, (logits == 2.0).int().argmax(1))


def test_one_entry_and_no_rows():
    sampled = sample(torch.full((2, 1), -3.0), *keys(2), top_p=0.1)
    assert sampled.tokens.tolist() == [0, 0] and sampled.log_probs.tolist() == [0.0, 0.0]
    for backend in BACKENDS:
        empty = sample(torch.zeros(0, 5), *keys(0), backend, top_k=2)
        assert [len(t) for t in empty] == [0] * 4


def test_numbers_that_keep_all_cut_nothing():
    logits = random_logits(2, 50)
    for parameters in ({"top_k": 50}, {"top_k": -1}, {"top_k": 2**40}, {"top_p": 1.0}):
        sampled = sample(logits, *keys(2), **parameters)
        assert not sampled.num_kept.any()
    ids = torch.tensor([2**40, 3])
    assert sample(logits, *keys(2), top_k=ids).num_kept.tolist() == [0, 3]


def test_float64_takes_the_reference():
    logits = random_logits(3, 60)
    wide, narrow = sample(logits.double(), *keys(3), top_k=5), sample(logits, *keys(3), top_k=5)
    assert torch.equal(wide.kept_ids, narrow.kept_ids)


@pytest.mark.parametrize(
    "change, message",
    (
        ({"logits": torch.zeros(2, 0)}, "expected 0 < V"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "positions has dtype int32"),
    ),
)
def test_wrong_arguments_are_refused(change, message):
    seeds, positions = keys(2)
    arguments = {"logits": torch.zeros(2, 6), "seeds": seeds, "positions": positions}
    with pytest.raises((ValueError, TypeError), match=message):
        sample_tokens(**{**arguments, **change})
