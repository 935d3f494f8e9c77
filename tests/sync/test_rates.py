"""Up to which share deltas pay: what a delta reads against what a dense sync receives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.remote.sync.changes import Rates, max_share, measure, share_of
from hybridengine.sync.transport import AllToAll
from tests.ranks import run_ranks

GB = 10**9


def test_the_examples_of_the_documentation() -> None:
    """7B parameters, float32 masters, an engine in 16 bits; bytes of every rank."""
    rates = Rates(dense=400 * GB, kept=2000 * GB, memory=3000 * GB)
    shard, engine = 6 * 7 * GB // 8, 2 * 7 * GB
    many = [engine * 7 // 8] * 8, [shard] * 8, [engine] * 8
    assert share_of(*many, rates, 2) == pytest.approx(0.017, abs=5e-4)
    few = [7 * GB] * 2, [21 * GB] * 2, [7 * GB] * 2
    assert share_of(*few, rates, 2) == pytest.approx(0.01)
    assert share_of(*few, rates._replace(dense=600 * GB), 2) == 0


@given(st.integers(1, 10**12), st.integers(1, 10**12), st.floats(1, 1e12), st.floats(1.1, 1e3))
def test_a_slower_link_never_lowers_the_share(size, received, rate, factor) -> None:
    slow, fast = (
        share_of([received], [3 * size], [size], Rates(dense, 1e12, 1e12), 1)
        for dense in (rate, rate * factor)
    )
    assert slow >= fast >= 0


def test_nothing_to_receive_makes_a_delta_useless() -> None:
    assert share_of([0, 0], [8, 8], [4, 4], Rates(1.0, 5.0, 15.0), 1) == 0


def test_a_dense_sync_casts_what_a_rank_keeps_too() -> None:
    received, compared, engine = [4.0], [12.0], [8.0]
    quick, slow = (Rates(dense=2.0, kept=kept, memory=8.0) for kept in (1e12, 4.0))
    assert share_of(received, compared, engine, quick, 1) == 0  # 2 s and 2.5 s
    share = share_of(received, compared, engine, slow, 1)  # 3 s
    assert share == pytest.approx(0.5 / (500 * 4 / 8))


def measure_body(rank: int, world_size: int) -> list:
    cpu, size = torch.device("cpu"), 1 << 30
    rates = [measure(cpu, pulls) for pulls in (True, False)]
    shares = [max_share([size] * 2, [size] * 2, [n] * 2, cpu, True) for n in (size, 1 << 20)]
    return [*rates, *shares]


def test_one_rank_measures_too() -> None:
    """It trains alone; its engine is in this process, or it sends to one in another."""
    cpu, size = torch.device("cpu"), 1 << 30
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert max_share([0], [size], [size], cpu, pulls=False) == 0
        assert max_share([0, size], [size], [0, size], cpu, pulls=False) >= 0
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.multirank
def test_all_ranks_measure_the_same() -> None:
    first, second = run_ranks(measure_body, 2)
    assert first == second and all(rate > 0 for rates in first[:2] for rate in rates)
    assert first[2] >= 0 and first[3] == 0, "a small engine is not measured"


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
