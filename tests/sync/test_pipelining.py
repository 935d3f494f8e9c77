"""The order of transfers of which two are under way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridengine.sync.transport import run_transfers


@pytest.mark.parametrize("count", (0, 1, 3))
def test_each_transfer_starts_before_the_one_before_is_finished(count: int) -> None:
    events: list[tuple[str, int]] = []

    def transfer(number: int) -> Iterator[None]:
        events.append(("start", number))
        yield
        events.append(("finish", number))

    run_transfers(transfer(number) for number in range(count))
    expected = [("start", 0), ("start", 1), ("finish", 0), ("start", 2), ("finish", 1)]
    assert events == [e for e in (*expected, ("finish", 2)) if e[1] < count]
