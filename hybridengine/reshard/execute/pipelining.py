"""Transfers of which two are under way at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def run_pipelined(transfers: Iterable[Iterator[None]]) -> None:
    """Run transfers, each of which yields once: when it has started, before it waits.

    Each starts before the one before it is finished.
    """
    previous: Iterator[None] = iter(())
    for transfer in transfers:
        next(transfer)  # start it
        next(previous, None)  # finish the one before
        previous = transfer
    next(previous, None)
