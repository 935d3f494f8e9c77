"""Run by test_sample_tokens.py with TRITON_INTERPRET=1 set before any import."""

import pytest
import torch

from hybridengine.kernels.sampling import SampledTokens
from hybridengine.kernels.sampling.reference import SamplingParameters
from hybridengine.kernels.sampling.triton import CHUNK, TILE, triton_sample
from tests.kernels.sampling.cases import PARAMETERS, check_rows, keys, per_row, random_logits


def sample(logits, seeds, positions, **parameters):
    numbers = per_row(len(logits), parameters)
    if parameters.get("temperature") == 0.0:
        numbers = per_row(len(logits), {**parameters, "temperature": 1e-9})
    return SampledTokens(
        *triton_sample(logits, SamplingParameters(*numbers, seeds, positions), True)
    )


LARGE = (torch.bfloat16, TILE), (torch.float32, 2 * TILE + 77)


@pytest.mark.parametrize(
    ("parameters", "dtype", "vocab"),
    [
        (parameters, *size)
        for i, parameters in enumerate(PARAMETERS)
        for size in ((torch.float32, 5), LARGE[i % 2])
    ],
    ids=str,
)
def test_against_float64(parameters, dtype, vocab):
    logits, (seeds, positions) = random_logits(2, vocab, vocab).to(dtype), keys(2, vocab, 2**35)
    check_rows(
        sample(logits, seeds, positions, **parameters), logits, seeds, positions, **parameters
    )


@pytest.mark.parametrize(
    "parameters", ({"top_p": 0.7}, {"top_k": 30, "top_p": 0.6}, {"min_p": 0.5})
)
@pytest.mark.parametrize("levels", (1, 2, 7))
def test_ties_and_removed_entries(parameters, levels):
    """Ties over several chunks: the lower ids are kept."""
    vocab = 3 * CHUNK + 5
    logits = (random_logits(2, vocab, levels, 1.0) * levels).round().clamp(-levels, levels)
    logits[0, ::2] = -torch.inf
    seeds, positions = keys(2)
    sampled = sample(logits, seeds, positions, **parameters)
    check_rows(sampled, logits, seeds, positions, **parameters)


@pytest.mark.parametrize("parameters", ({"top_p": 0.5}, {"top_k": 2, "min_p": 0.5}), ids=str)
def test_scaled_logits_beyond_float32(parameters):
    logits = random_logits(2, 300).clamp(-1, 1) * 3e38
    parameters = parameters | {"temperature": 1e-5}
    for some in (logits, -logits.abs() - 3e37):
        check_rows(sample(some, *keys(2), **parameters), some, *keys(2), **parameters)


def test_rows_that_cannot_be_sampled():
    logits = torch.zeros(4, 100)
    logits[0], logits[1, 50], logits[2, 0] = -torch.inf, torch.nan, torch.inf
    for parameters in ({}, {"top_k": 3}, {"temperature": 0.0}):
        sampled = sample(logits, *keys(4), **parameters)
        assert sampled.tokens[:3].tolist() == [0, 0, 0]
        assert sampled.log_probs.isnan().tolist() == [True, True, True, False]
        assert sampled.num_kept[:3].tolist() == [0, 0, 0]
