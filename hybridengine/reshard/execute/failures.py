"""Which rank is to blame when a collective of a sync fails.

A rank that fails leaves word in the rendezvous store of the process group. One whose collective
fails reads there what the others say; those that say nothing within a few seconds are gone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from hybridengine.sharding.layout import LayoutError

__all__ = [
    "FailureBoard",
    "PlanOutdatedError",
    "RankLostError",
    "ReshardError",
    "agree",
    "agreed",
    "attempt",
]

_GRACE_S = 5.0  # a collective fails on all survivors at about the same time
_boards = itertools.count()  # every rank makes its boards in the same order


class ReshardError(RuntimeError):
    """A sync that did not arrive whole."""


class RankLostError(ReshardError, dist.DistError):
    """Another rank died, hangs or failed in the middle of a sync; the message names it."""


class PlanOutdatedError(LayoutError):
    """The trained parameters are no longer what the reshard was planned for: plan it again."""


def attempt(step: Callable[[], Any]) -> tuple[Any, str | None]:
    """(What `step` returns, None) or (None, what is wrong)."""
    try:
        return step(), None
    except (LayoutError, ValueError) as error:
        return None, str(error)


def agree(problem: str | None, error: type[LayoutError] = LayoutError) -> None:
    """Raise `error` on every rank where any rank has a problem; collective."""
    problems: list[str | None] = [None] * dist.group.WORLD.size()
    dist.all_gather_object(problems, problem)
    found: dict[str, int] = {}
    for rank, text in enumerate(problems):
        if text:
            found.setdefault(text, rank)
    if found:
        raise error("; ".join(f"on rank {rank}: {text}" for text, rank in found.items()))


def agreed(step: Callable[[], Any]) -> Any:
    """What `step` returns. LayoutError on every rank for what any rank finds wrong; collective."""
    result, problem = attempt(step)
    agree(problem)
    return result


class FailureBoard:
    """One rank's place among the ranks of a sync. phase: what it does now, for the messages."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._others = rank, [r for r in range(world_size) if r != rank]
        self._prefix = f"hybridengine/reshard/{next(_boards)}"
        self._attempt = 0
        self.phase = ""

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """One sync: a failure inside is told to the other ranks, with this rank's phase."""
        self._attempt, self._what, self.phase = self._attempt + 1, what, "starting"
        try:
            yield
        except RankLostError:
            raise
        except BaseException as error:
            self._tell(f"failed {self._place}: {_one_line(error)}")
            error.add_note(f"rank {self._rank} failed {self._place}")
            raise

    @contextmanager
    def meeting(self, phase: str) -> Iterator[None]:
        """A collective. Raises RankLostError where it fails because of another rank."""
        self.phase = phase
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise
            raise RankLostError(
                f"rank {self._rank} stopped {self._place}: {self._cause()} ({_one_line(error)}). "
                "The engine's weights are not whole: restart the lost ranks and sync again."
            ) from error

    @property
    def _place(self) -> str:
        return f"in {self._what} while {self.phase}"

    def _tell(self, word: str) -> None:
        with suppress(RuntimeError, ValueError):  # without a store there is nobody to tell
            self._store().set(str(self._rank), word)

    def _store(self) -> dist.Store:
        store = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"{self._prefix}/{self._attempt}", store)

    def _cause(self) -> str:
        """What the other ranks say of the failure, or which of them say nothing."""
        try:
            store = self._store()
            store.set(str(self._rank), "waited")
            silent, deadline = self._others, time.monotonic() + _GRACE_S
            while silent and time.monotonic() < deadline:
                time.sleep(0.05)
                silent = [r for r in silent if not store.check([str(r)])]
            words = {r: store.get(str(r)).decode() for r in self._others if r not in silent}
        except RuntimeError:
            return "the rendezvous store is gone too: its host, rank 0's node or agent, ended"
        failed = [f"rank {r} {word}" for r, word in words.items() if word != "waited"]
        if failed:
            return "; ".join(failed)
        if silent:
            return f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} died or hangs"
        return "all ranks are there, but their connection failed"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
