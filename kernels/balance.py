"""Balancing: sequences to ranks and to micro-batches so that every one has as many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ._backend import native


class Imbalance(NamedTuple):
    """Tokens per bin."""

    largest: int
    smallest: int
    mean: float

    @property
    def ratio(self) -> float:
        """largest / mean: 1 is perfect, and what is above it is the time the others wait."""
        return self.largest / self.mean if self.mean else 1.0


def balance(
    lengths: Sequence[int] | Tensor, num_bins: int, *, equal_count: bool = False
) -> list[list[int]]:
    """Split sequences into bins whose total lengths are as equal as can be found quickly.

    Karmarkar-Karp differencing, then exchanges with the fullest bin until none helps. The same
    lengths always give the same bins.

    Args:
        lengths: of N sequences, 0 or more each.
        num_bins: how many bins; where N is at least that, none is empty.
        equal_count: the numbers of sequences in the bins differ by one at most.

    Returns:
        num_bins lists of positions in `lengths`, each ascending.

    Raises:
        ValueError: num_bins below 1, a negative length (the message names it).
        RuntimeError: the extension is not built.

    Example:
        >>> balance([8, 7, 6, 5, 4], 2)
        [[0, 1], [2, 3, 4]]
    """
    if isinstance(lengths, Tensor):
        lengths = lengths.tolist()
    if native() is None:
        raise RuntimeError("balance needs hybridengine._C, which is not built (pip install -e .)")
    return native().balance(list(lengths), num_bins, equal_count)


def balance_by_tokens(
    lengths: Sequence[int] | Tensor, max_tokens: int, *, min_bins: int = 1, multiple_of: int = 1
) -> list[list[int]]:
    """Split sequences into the fewest balanced bins that hold at most `max_tokens` each.

    Args:
        lengths: of N sequences.
        max_tokens: the token budget of a micro-batch.
        min_bins: at least so many bins; ranks that must agree give the largest any of them needs.
        multiple_of: the number of bins is a multiple of this.

    Raises:
        ValueError: a sequence alone exceeds the budget (the message names it).

    Example:
        >>> balance_by_tokens([5, 5, 4, 3], 9)
        [[0, 2], [1, 3]]
    """
    if isinstance(lengths, Tensor):
        lengths = lengths.tolist()
    for i, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"balance_by_tokens: lengths[{i}] is {length}, above max_tokens {max_tokens}; "
                "raise the budget or truncate the sequence"
            )
    needed = -(-sum(lengths) // max_tokens) if lengths else 0
    num_bins = max(needed, min_bins, 1)
    while True:
        num_bins = -(-num_bins // multiple_of) * multiple_of
        bins = balance(lengths, num_bins)
        if imbalance(lengths, bins).largest <= max_tokens:
            return bins
        num_bins += 1


def imbalance(lengths: Sequence[int] | Tensor, bins: Sequence[Sequence[int]]) -> Imbalance:
    """How even `bins` are: the largest, smallest and mean total of `lengths` in a bin."""
    if isinstance(lengths, Tensor):
        lengths = lengths.tolist()
    totals = [sum(lengths[i] for i in items) for items in bins]
    return Imbalance(max(totals), min(totals), sum(totals) / len(totals))
