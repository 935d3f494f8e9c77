"""Sequences with common prefixes of every depth, for the tests of shared-prefix packing."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.tiny_models import VOCAB


@st.composite
def forests(draw, max_sequences: int = 6, max_run: int = 12) -> list[list[int]]:
    """Sequences that each continue a prefix of an earlier one; of at least one token."""
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_sequences))):
        base = draw(st.sampled_from(sequences)) if sequences else []
        base = base[: draw(st.integers(0, len(base)))]
        run = draw(st.lists(st.integers(3, VOCAB - 1), min_size=not base, max_size=max_run))
        sequences.append([*base, *run])
    return sequences


def group_pairs(seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) pairs: three groups with a common template, in no order, 151 tokens.

    Responses share beginnings, are equal, are a prefix of another, or empty; one prompt continues
    another; the longest sequence is above the window of the tiny models.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(3, VOCAB, (n,), generator=generator).tolist()

    template = ids(4)
    prompts = [template + ids(9), template + ids(2), ids(1)]
    prompts[1] = prompts[0][:6] + ids(3)
    start = ids(5)
    pairs = [
        (prompts[0], start + ids(4)),
        (prompts[2], ids(7)),
        (prompts[0], ids(12)),
        (prompts[1], start),
        (prompts[0], start + ids(25)),
        (prompts[2], []),
        (prompts[1], ids(1)),
    ]
    return [*pairs, pairs[0], (prompts[0], start)]
