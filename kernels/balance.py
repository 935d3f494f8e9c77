"""balance: assign sequences to ranks and micro-batches with nearly equal numbers of tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from . import _check as check
from ._backend import native


class Imbalance(NamedTuple):
    """Tokens per bin."""

    largest: int
    smallest: int
    mean: float

    @property
    def ratio(self) -> float:
        """largest / mean: 1 is perfect; the excess over 1 is the time that the other ranks wait."""
        return self.largest / self.mean if self.mean else 1.0


def balance(
    lengths: Iterable[int] | Tensor,
    num_bins: int,
    *,
    equal_count: bool = False,
    group_ids: Sequence[Hashable] | Tensor | None = None,
) -> list[list[int]]:
    """Split sequences into bins of nearly equal total length.

    Karmarkar-Karp differencing, then exchanges with the fullest bin until none helps. The result is
    deterministic.

    Args:
        lengths: the lengths of N sequences: any iterable of integers >= 0, or a tensor [N].
        num_bins: the number of bins; with at least as many sequences, none is empty.
        equal_count: the numbers of sequences in the bins differ by one at most; with group_ids,
            those of groups.
        group_ids: [N] of any kind: sequences with equal ids, such as the responses to one prompt,
            go to the same bin.

    Returns:
        num_bins lists of positions in `lengths`, each ascending.

    Raises:
        ValueError: num_bins below 1, a length that is negative or no integer, another number of
            group_ids.
        RuntimeError: the extension is not built.

    Examples:
        >>> balance([8, 7, 6, 5, 4], 2)
        [[0, 1], [2, 3, 4]]
    """
    lengths = _listed("balance", lengths)
    check.integer("balance", "num_bins", num_bins, at_least=1)
    if group_ids is None:
        return _native("balance").balance(lengths, num_bins, equal_count)
    ids = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
    if len(ids) != len(lengths):
        raise ValueError(
            f"balance: group_ids has {len(ids)} entries; expected {len(lengths)}, one per length."
        )
    groups: dict[Hashable, list[int]] = {}
    for i, one in enumerate(ids):
        groups.setdefault(one, []).append(i)
    members = list(groups.values())
    totals = [sum(lengths[i] for i in group) for group in members]
    bins = _native("balance").balance(totals, num_bins, equal_count)
    return [sorted(i for group in items for i in members[group]) for items in bins]


def balance_by_tokens(
    lengths: Iterable[int] | Tensor, max_tokens: int, *, min_bins: int = 1, multiple_of: int = 1
) -> list[list[int]]:
    """Split sequences into the fewest balanced bins that hold at most `max_tokens` each.

    Their number is searched between a lower bound and the bins of best-fit decreasing. Called again
    with a larger `min_bins`, it returns exactly that many (rounded up to `multiple_of`), so ranks
    that must agree pass the largest number that any of them needs.

    Args:
        lengths: the lengths of N sequences: any iterable of integers, or a tensor [N].
        max_tokens: the token budget of a micro-batch.
        min_bins: the smallest number of bins to return.
        multiple_of: the number of bins is a multiple of this.

    Raises:
        ValueError: a sequence longer than max_tokens.

    Examples:
        >>> balance_by_tokens([5, 5, 4, 3], 9)
        [[0, 3], [1, 2]]
    """
    op = "balance_by_tokens"
    lengths = _listed(op, lengths)
    check.integer(op, "max_tokens", max_tokens, at_least=1)
    check.integer(op, "min_bins", min_bins, at_least=0)
    check.integer(op, "multiple_of", multiple_of, at_least=1)
    return _native(op).balance_by_tokens(lengths, max_tokens, min_bins, multiple_of)


def imbalance(lengths: Iterable[int] | Tensor, bins: Sequence[Sequence[int]]) -> Imbalance:
    """Compute the largest, smallest and mean total length of `bins`."""
    lengths = _listed("imbalance", lengths)
    for i, items in enumerate(bins):
        for position in items:
            check.integer("imbalance", f"a position in bins[{i}]", position, at_least=0)
            if position >= len(lengths):
                raise ValueError(
                    f"imbalance: bins[{i}] has position {position}; expected one below "
                    f"{len(lengths)}, the number of lengths."
                )
    totals = [sum(lengths[i] for i in items) for items in bins]
    if not totals:
        raise ValueError("imbalance: bins is empty; expected at least one bin.")
    return Imbalance(max(totals), min(totals), sum(totals) / len(totals))


def _listed(op: str, lengths: Iterable[int] | Tensor) -> list[int]:
    """Check the lengths and return them as a list of int."""
    values = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    if not isinstance(values, list):
        raise ValueError(f"{op}: lengths has shape []; expected [N].")
    for i, length in enumerate(values):
        if isinstance(length, bool) or not hasattr(length, "__index__"):
            raise ValueError(
                f"{op}: lengths[{i}] is {length!r} ({type(length).__name__}); expected an integer."
            )
        if length.__index__() < 0:  # in a group, it would be hidden by the others
            raise ValueError(f"{op}: lengths[{i}] is {length}; expected 0 or more.")
    return [length.__index__() for length in values]


def _native(op: str) -> ModuleType:
    module = native()
    if module is None:
        raise RuntimeError(f"{op} needs hybridengine._C, which is not built (pip install -e .)")
    return module
