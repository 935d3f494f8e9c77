"""sample_tokens: kept entries, draws and log-probs against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import sample_tokens
from hybridengine.kernels.sampling.reference import philox_uniform
from tests.kernels.interpreter import run_interpreted
from tests.kernels.sampling.cases import PARAMETERS, check_rows, keys, random_logits, sample

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = (
    "cpp",
    "reference",
    pytest.param("triton", marks=pytest.mark.gpu),
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("vocab", (5, 1000, 20_000))
def test_against_float64(parameters, dtype, vocab, backend):
    rows = 3
    logits, (seeds, positions) = random_logits(rows, vocab, vocab).to(dtype), keys(rows, vocab)
    sampled = sample(logits, seeds, positions, backend, **parameters)
    check_rows(sampled, logits, seeds, positions, **parameters)


@settings(max_examples=150)
@given(
    rows=st.integers(0, 4),
    vocab=st.integers(1, 1200),
    dtype=st.sampled_from(DTYPES),
    levels=st.sampled_from((0, 1, 3, 40)),
    scale=st.sampled_from((1e-3, 1.0, 5.0, 300.0)),
    removed=st.sampled_from((0.0, 0.5, 0.97)),
    offset=st.sampled_from((0.0, -1e4, 1e4)),
    temperature=st.sampled_from((1.0, 0.6, 2.5)),
    top_k=st.sampled_from((0, 1, 2, 17, 400, 5000)),
    top_p=st.sampled_from((1.0, 0.99, 0.7, 0.2)),
    min_p=st.sampled_from((0.0, 0.0, 1e-4, 0.3)),
    seed=st.integers(0, 1000),
)
def test_random_rows(
    rows, vocab, dtype, levels, scale, removed, offset, temperature, top_k, top_p, min_p, seed
):
    """With ties (a few levels), removed entries and large offsets."""
    logits = random_logits(rows, vocab, seed, scale)
    if levels:
        logits = (logits * levels / scale).round() * scale / levels
    removed_entries = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(1)) < removed
    removed_entries[:, 0] = False
    logits = (logits + offset).masked_fill(removed_entries, -torch.inf).to(dtype)
    seeds, positions = keys(rows, seed, 3)
    parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampled = sample(logits, seeds, positions, **parameters)
    check_rows(sampled, logits, seeds, positions, **parameters)


def test_parameters_of_each_row():
    logits, (seeds, positions) = random_logits(len(PARAMETERS), 3000), keys(len(PARAMETERS))
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    full = [{**defaults, **parameters} for parameters in PARAMETERS]
    columns = {name: torch.tensor([one[name] for one in full]) for name in defaults}
    together = sample(logits, seeds, positions, **columns)
    kept = together.kept_ids.split(together.num_kept.tolist())
    for i, parameters in enumerate(PARAMETERS):
        row = slice(i, i + 1)
        alone = sample(logits[row], seeds[row], positions[row], **parameters)
        for got, want in zip(alone[:3], together[:3], strict=True):
            assert torch.equal(got, want[row])
        assert torch.equal(alone.kept_ids, kept[i])


@pytest.mark.parametrize("parameters", ({}, {"top_p": 0.9}, {"top_k": 40}), ids=str)
def test_a_row_does_not_depend_on_other_rows_threads_or_strides(parameters):
    vocab = 40_000
    logits, (seeds, positions) = random_logits(9, vocab), keys(9, 5)
    expected = sample(logits, seeds, positions, **parameters)
    wide = torch.full((9, vocab + 3), 50.0)
    wide[:, 1:-2] = logits
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for source in (logits, wide[:, 1:-2], logits.t().contiguous().t()):
                for rows in (slice(0, 1), slice(8, 9), slice(2, 7)):
                    got = sample(source[rows], seeds[rows], positions[rows], **parameters)
                    for one, want in zip(got[:3], expected[:3], strict=True):
                        assert torch.equal(one, want[rows])
    finally:
        torch.set_num_threads(threads)


def test_philox_is_that_of_random123():
    """The known answer of Random123 for Philox4x32-10 of key 0 and counter 0."""
    assert philox_uniform(0, 0) == ((0x6627E8D5E169C58D >> 12) + 0.5) * 2.0**-52


def test_the_number_of_a_seed_and_a_position():
    """Equal logits turn the number into a token; all 64 bits of both words count."""
    vocab = 2**15
    words = torch.tensor([0, 1, -1, 2**31, 2**32, 2**40 + 3, -(2**63), 2**63 - 1])
    seeds, positions = words.repeat_interleave(8), words.repeat(8)
    tokens = sample_tokens(torch.zeros(64, vocab), seeds, positions).tokens
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    assert tokens.tolist() == [int(philox_uniform(*pair) * vocab) for pair in pairs]
    assert tokens.unique().numel() == 64


def chi_square(counts, probabilities):
    """Return the statistic in standard deviations from its mean."""
    expected = probabilities.double() * counts.sum()
    statistic = ((counts - expected).square() / expected).sum()
    freedom = counts.numel() - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("parameters", ({}, {"top_p": 0.8}, {"top_k": 9, "temperature": 0.8}))
@pytest.mark.parametrize("draws", (10**6, pytest.param(10**7, marks=pytest.mark.exhaustive)))
def test_the_distribution(parameters, draws):
    """Chi-square over positions of one seed, and over seeds of one position."""
    vocab, batch = 40, 2**16
    logits = random_logits(1, vocab, 4, 1.0)
    one = sample(logits, *keys(1), **parameters)
    kept = one.kept_ids.long() if parameters else torch.arange(vocab)
    scaled = logits[0, kept].double() / parameters.get("temperature", 1.0)
    rows = logits.expand(batch, vocab)
    for varied in range(2):
        counts = torch.zeros(vocab, dtype=torch.int64)
        for first in range(0, draws, batch):
            numbers = torch.arange(first, first + batch), torch.full((batch,), 12345)
            pair = numbers if varied else numbers[::-1]
            counts += sample_tokens(rows, *pair, **parameters).tokens.bincount(minlength=vocab)
        assert counts.sum() == counts[kept].sum()
        assert abs(chi_square(counts[kept], scaled.softmax(0))) < 4.5


def test_a_large_vocabulary_is_drawn_from_all_over():
    """The block and the entry in it: the mean and the variance of the drawn ids."""
    vocab, rows = 150_001, 20_000
    logits = torch.zeros(1, vocab).expand(rows, vocab)
    tokens = sample_tokens(logits[:64], *keys(64)).tokens
    assert tokens.unique().numel() == 64
    small = torch.zeros(1, 3001).expand(rows, 3001)
    ids = sample_tokens(small, *keys(rows)).tokens.double() / 3000
    assert abs(float(ids.mean()) - 0.5) < 5 * (1 / 12 / rows) ** 0.5
    assert abs(float(ids.square().mean()) - 1 / 3) < 5 * (4 / 45 / rows) ** 0.5


@pytest.mark.slow
def test_the_triton_kernels_in_the_interpreter():
    run_interpreted("sampling/interpreted_sampling.py")
