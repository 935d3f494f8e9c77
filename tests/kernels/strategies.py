"""Strategies that the tests of operators share."""

from __future__ import annotations

from hypothesis import strategies as st


def integers(**bounds: tuple[int, int]) -> dict[str, st.SearchStrategy[int]]:
    """Return a strategy for each name, of the integers from its first to its second bound."""
    return {name: st.integers(*limits) for name, limits in bounds.items()}
