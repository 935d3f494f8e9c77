"""The wait for a device names unfinished phases and lost ranks. Guards of two ranks, no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hybridengine.run import failures
from hybridengine.run.activity import machine_id
from hybridengine.run.failures import CollectiveError, CollectiveGuard, DeviceProgress
from hybridengine.run.messages import group_timeout

CPU = torch.device("cpu")


class Event:
    """Finished at the `queries`-th query; 0: never."""

    def __init__(self, queries: int) -> None:
        self.queries, self.count = queries, 0

    def query(self) -> bool:
        self.count += 1
        return self.count == self.queries


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CollectiveGuard, CollectiveGuard]]:
    monkeypatch.setattr(failures, "ANSWER_S", 0.2)
    monkeypatch.setattr(failures, "LOOK_S", 0.02)
    store = dist.HashStore()
    monkeypatch.setattr(failures, "guard_numbers", iter([0, 0]))
    yield CollectiveGuard(0, 2, store), CollectiveGuard(1, 2, store)


def waiting(guard: CollectiveGuard, events: list[Event], limit_s: float = 60.0) -> DeviceProgress:
    """Mark one bucket for each event."""
    progress, remaining = DeviceProgress(guard, torch.device("cuda"), limit_s), iter(events)
    stream = SimpleNamespace(record_event=lambda: next(remaining))
    with patch.object(torch.cuda, "current_stream", lambda device: stream):
        for i in range(len(events)):
            progress.mark(f"exchanging bucket {i + 1} of {len(events)}")
    return progress


def message(guard: CollectiveGuard, progress: DeviceProgress) -> str:
    with pytest.raises(CollectiveError) as error, guard.operation("the sync to version 2"):
        progress.wait()
    return str(error.value)


def test_every_phase_is_waited_for_in_order(guards) -> None:
    events = [Event(4), Event(1), Event(2)]
    progress = waiting(guards[0], events)
    progress.wait()
    assert [e.count for e in events] == [4, 1, 2]
    assert guards[0].phase == "exchanging bucket 3 of 3"
    progress.wait()  # nothing is left


def test_a_stalled_rank_and_its_phase_are_named_in_time(guards) -> None:
    guards[1].phase = "packing bucket 2 of 3"
    with guards[1].operation("the sync to version 2"):
        guards[1].phase = "packing bucket 2 of 3"
        guards[1].set(guards[1].key("answer", 1), f"busy|is in {guards[1].place}, at step.py:3")
    text = message(guards[0], waiting(guards[0], [Event(1), Event(0), Event(0)], 0.1))
    assert text == (
        "rank 0 stopped in the sync to version 2 while exchanging bucket 2 of 3: rank 1 is in the "
        "sync to version 2 while packing bucket 2 of 3, at step.py:3 (DistError: the device has "
        "not finished it after 0.1 s)."
    )


def test_a_failed_rank_is_named_long_before_the_deadline(guards) -> None:
    with pytest.raises(MemoryError), guards[1].operation("the sync to version 2"):
        guards[1].phase = "packing bucket 1 of 1"
        raise MemoryError("no memory")
    text = message(guards[0], waiting(guards[0], [Event(0)]))
    assert "while exchanging bucket 1 of 1: rank 1 failed in the sync to version 2 while pa" in text
    assert "MemoryError: no memory" in text


def test_an_ended_process_is_named_long_before_the_deadline(guards) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    guards[1].set("process/1", f"{machine_id()}|{process.pid}")
    text = message(guards[0], waiting(guards[0], [Event(0)]))
    assert "while exchanging bucket 1 of 1: rank 1 has ended (DistError: rank 1 has ended)" in text
    guards[1].finish()  # it may end
    assert guards[0].lost_rank() is None


def test_errors_of_the_device_are_raised_as_they_are(guards) -> None:
    class Broken(Event):
        def query(self) -> bool:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        waiting(guards[0], [Broken(1)]).wait()


def test_on_a_cpu_there_is_nothing_to_wait_for(guards) -> None:
    progress = DeviceProgress(guards[0], CPU)
    phase = guards[0].phase
    progress.mark("exchanging bucket 1 of 1")
    progress.wait()
    assert guards[0].phase == phase


def test_the_limit_is_below_the_timeout_of_the_group() -> None:
    timeout = timedelta(seconds=40)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        assert group_timeout(CPU).total_seconds() == 40 and failures.LIMIT_SHARE < 1
    finally:
        dist.destroy_process_group()
