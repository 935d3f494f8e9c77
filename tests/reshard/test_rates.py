"""Whether deltas pay on GPUs: what a delta reads against what a dense sync receives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.reshard.source.rates import Rates, delta_pays, measure
from hybridengine.reshard.transport.in_world import AllToAll
from tests.ranks import run_ranks

GB = 10**9


def pays(parameters: int, world_size: int, tp_size: int, received: int, rates: Rates) -> bool:
    """Float32 masters, an engine in 16 bits."""
    shard, engine = 4 * parameters // world_size, 2 * parameters // tp_size
    return delta_pays(*([x] * world_size for x in (received, shard, engine)), rates)


def test_the_examples_of_the_documentation() -> None:
    rates = Rates(link=400 * GB, memory=3000 * GB)
    assert pays(7 * GB, 8, 1, 14 * GB * 7 // 8, rates)
    assert not pays(7 * GB, 2, 2, 7 * GB, rates)


@given(st.integers(1, 10**12), st.integers(1, 10**12), st.floats(1, 1e12), st.floats(1.1, 1e3))
def test_a_slower_link_never_turns_deltas_off(size, received, link, factor) -> None:
    slow, fast = Rates(link, 1e12), Rates(link * factor, 1e12)
    assert delta_pays([received], [size], [size], slow) >= delta_pays(
        [received], [size], [size], fast
    )


def test_nothing_to_receive_makes_a_delta_useless() -> None:
    assert not delta_pays([0, 0], [8, 8], [4, 4], Rates(1.0, 1e12))


def measure_body(rank: int, world_size: int) -> Rates:
    return measure(torch.device("cpu"))


@pytest.mark.multirank
def test_all_ranks_measure_the_same() -> None:
    first, second = run_ranks(measure_body, 2)
    assert first == second and first.link > 0 and first.memory > 0


@pytest.mark.parametrize("keeps", [False, True])
def test_staging_buffers_that_serve_all_syncs(keeps: bool) -> None:
    transport = AllToAll(None, None, torch.device("cpu"), 64, False, keeps_staging=keeps)
    transport.begin()
    buffers = [transport._buffers.next(size, 64) for size in (64, 64, 32)]
    assert [b.data_ptr() == buffers[0].data_ptr() for b in buffers] == [True, False, True]
    addresses = [buffer.data_ptr() for buffer in buffers]
    transport.end()
    assert [buffer.untyped_storage().nbytes() for buffer in buffers] == [64 * keeps] * 3
    transport.begin()
    if keeps:
        assert [transport._buffers.next(64, 64).data_ptr() for _ in range(3)] == addresses
        transport.begin()  # the last sync has failed, and may still write
        assert transport._buffers.next(64, 64).data_ptr() not in addresses
