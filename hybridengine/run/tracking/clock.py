"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class RunClock:
    """The seconds of a run by part, such as `step`; every moment belongs to exactly one part.

    Attributes:
        part: the current one.
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self._seconds = defaultdict[str, float](float)
        self._since = time.perf_counter()

    def enter(self, part: str) -> str:
        """Begin a part; return the one that ends."""
        now = time.perf_counter()
        self._seconds[self.part] += now - self._since
        self._since, ended, self.part = now, self.part, part
        return ended

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """What runs inside belongs to `part`, and interrupts the part around it."""
        outer = self.enter(part)
        try:
            yield
        finally:
            self.enter(outer)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all parts up to now."""
        self.enter(self.part)
        return dict(self._seconds)

    def add(self, seconds: dict[str, float]) -> None:
        """Add those of an earlier part of the run."""
        for part, x in seconds.items():
            self._seconds[part] += x
