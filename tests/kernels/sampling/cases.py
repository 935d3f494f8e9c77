"""Inputs of the tests of sample_tokens, and the conditions that define its results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridengine.kernels import sample_tokens
from hybridengine.kernels.sampling import SampledTokens
from hybridengine.kernels.sampling.reference import kept_entries, philox_uniform

# Float32 weights and their sums over a row: the part of the distribution that rounding may move.
MASS_ERROR = 1e-6

PARAMETERS = (
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 3000},
    {"top_p": 1e-6},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 700, "top_p": 0.5},
    {"min_p": 0.02, "top_p": 0.9},
    {"min_p": 0.01, "top_k": 30, "top_p": 0.9, "temperature": 0.7},
    {"temperature": 1.7, "top_p": 0.9},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.5},
)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def keys(rows: int, first_seed: int = 0, position: int = 0) -> tuple[Tensor, Tensor]:
    """Return seeds and positions."""
    return torch.arange(first_seed, first_seed + rows), torch.full((rows,), position)


def per_row(rows: int, parameters: dict[str, Any]) -> list[Tensor]:
    """Return temperature, top_k, top_p and min_p as [rows]; a greedy temperature becomes 1."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values = {**defaults, **parameters}
    if values["temperature"] == 0.0:
        values = defaults
    dtypes = {"top_k": torch.int32}
    return [torch.full((rows,), v, dtype=dtypes.get(k)) for k, v in values.items()]


def check_rows(
    sampled: SampledTokens, logits: Tensor, seeds: Tensor, positions: Tensor, **parameters: Any
) -> None:
    """Check the results against float64: kept entries, drawn tokens and log-probs."""
    rows, vocab = logits.shape
    numbers = per_row(rows, parameters)
    temperature, top_k, top_p, min_p = numbers
    wide = logits.double() / temperature.double().unsqueeze(1)
    expected = kept_entries(logits, *numbers)
    is_cut = bool((top_p < 1).any() or (min_p > 0).any() or ((top_k > 0) & (top_k < vocab)).any())
    kept = expected
    if is_cut:
        ids = sampled.kept_ids.split(sampled.num_kept.tolist())
        kept = torch.zeros_like(expected)
        for row, one in zip(kept, ids, strict=True):
            assert (one.diff() > 0).all()
            row[one.long()] = True
        _check_kept(kept, expected, logits, numbers)
    else:
        assert not sampled.num_kept.any() and not sampled.kept_ids.numel()
    log_p = wide.masked_fill(~kept, -torch.inf).log_softmax(1)
    chosen = log_p.gather(1, sampled.tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(sampled.log_probs.double(), chosen, rtol=3e-7, atol=3e-7)
    if parameters.get("temperature") == 0.0:
        assert torch.equal(sampled.tokens, logits.float().argmax(1))
        return
    cumulative = log_p.exp().cumsum(1)
    for row, token in enumerate(sampled.tokens.tolist()):
        u = philox_uniform(int(seeds[row]), int(positions[row]))
        below = float(cumulative[row, token - 1]) if token else 0.0
        assert below - MASS_ERROR <= u <= float(cumulative[row, token]) + MASS_ERROR


def _check_kept(kept: Tensor, expected: Tensor, logits: Tensor, numbers: list[Tensor]) -> None:
    """Kept entries may differ where the cumulative probability is top_p up to rounding."""
    temperature, top_k, top_p, min_p = numbers
    for delta in (0.0, -MASS_ERROR, MASS_ERROR):
        moved = (top_p + delta).clamp(max=1.0) if delta else top_p
        other = kept_entries(logits, temperature, top_k, moved.where(top_p < 1, 1.0), min_p)
        expected = torch.where((kept == expected).all(1, keepdim=True), expected, other)
    assert torch.equal(kept, expected)


def sample(logits, seeds, positions, backend=None, **parameters):
    """Run on the device of the backend; return results on the CPU, with kept ids."""
    device = "cuda" if backend == "triton" else "cpu"
    arguments = (t.to(device) for t in (logits, seeds, positions))
    sampled = sample_tokens(*arguments, **parameters, return_kept_ids=True, backend=backend)
    return type(sampled)(*(t.cpu() for t in sampled))
