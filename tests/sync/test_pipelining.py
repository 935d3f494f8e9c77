"""The order of transfers of which two are under way, and the buffers that serve them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hybridengine.sync.transport import AllToAll, run_transfers


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


@pytest.mark.parametrize("keeps", [False, True])
def test_staging_buffers_that_serve_all_syncs(keeps: bool) -> None:
    transport = AllToAll(None, None, torch.device("cpu"), 64, False, keeps_staging=keeps)
    transport.begin()
    buffers = [transport.buffers.next(size, 64) for size in (64, 64, 32)]
    assert [b.data_ptr() == buffers[0].data_ptr() for b in buffers] == [True, False, True]
    addresses = [buffer.data_ptr() for buffer in buffers]
    transport.end()
    assert [buffer.untyped_storage().nbytes() for buffer in buffers] == [64 * keeps] * 3
    transport.begin()
    if keeps:
        assert [transport.buffers.next(64, 64).data_ptr() for _ in range(3)] == addresses
        transport.begin()  # the last sync has failed, and may still write
        assert transport.buffers.next(64, 64).data_ptr() not in addresses
