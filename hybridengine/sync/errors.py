"""Errors of a weight sync. A problem of the model or the engine is a `LayoutError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hybridengine.run.failures import CollectiveError, CollectiveGuard
from hybridengine.sync.layout import LayoutError


class ReshardError(RuntimeError):
    """A sync did not complete."""


class RankFailedError(ReshardError, CollectiveError):
    """Another rank was killed, failed or stalled during a sync; the message names it."""


class PlanOutdatedError(LayoutError):
    """The trained parameters differ from those the reshard was planned for: plan it again."""


class LinkError(CollectiveError):
    """A connection between trainers and engines failed; the transfer can be repeated."""


class CorruptDeltaError(ValueError):
    """A message does not match its header, or its header does not match the engine."""


@contextmanager
def operation(guard: CollectiveGuard, name: str, advice: str = "") -> Iterator[None]:
    """As `guard.operation`; RankFailedError where a collective fails because of another rank."""
    try:
        with guard.operation(name):
            yield
    except RankFailedError:
        raise
    except CollectiveError as error:
        raise RankFailedError(f"{error} {advice}".rstrip()) from error
