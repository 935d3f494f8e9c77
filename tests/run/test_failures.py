"""What a rank learns from the others when its collective fails: guards of two ranks, one store."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hybridengine.run import failures
from hybridengine.run.activity import machine_id
from hybridengine.run.failures import CollectiveError, CollectiveGuard

Guards = tuple[CollectiveGuard, CollectiveGuard]


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guards]:
    monkeypatch.setattr(failures, "ANSWER_S", 0.2)
    store = dist.HashStore()
    monkeypatch.setattr(failures, "guard_numbers", iter([0, 0]))  # each process has its own
    yield CollectiveGuard(0, 2, store), CollectiveGuard(1, 2, store)


def message_in_a_sync(guard: CollectiveGuard) -> str:
    with (
        pytest.raises(CollectiveError) as error,
        guard.operation("the sync to version 2"),
        guard.collective("committing"),
    ):
        raise RuntimeError("Connection closed by peer\nmore")
    return str(error.value)


def test_a_failure_is_reported_with_its_phase(guards: Guards) -> None:
    with pytest.raises(MemoryError) as error, guards[1].operation("the sync to version 2"):
        guards[1].phase = "packing bucket 1 of 2"
        raise MemoryError("no memory")
    assert error.value.__notes__ == [
        "rank 1 failed in the sync to version 2 while packing bucket 1 of 2"
    ]
    assert message_in_a_sync(guards[0]) == (
        "rank 0 stopped in the sync to version 2 while committing: rank 1 failed in the sync to "
        "version 2 while packing bucket 1 of 2: MemoryError: no memory "
        "(RuntimeError: Connection closed by peer)."
    )
    with guards[0].operation("the next sync"):  # knows nothing of the last one
        assert guards[0].failed_rank() is None


def test_a_rank_without_answer_is_named_by_the_state_of_its_process(guards: Guards) -> None:
    assert "committing: rank 1 was killed or stalled (" in message_in_a_sync(guards[0])
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    guards[1].set("process/1", f"{machine_id()}|{process.pid}")
    assert "committing: rank 1 has ended (" in message_in_a_sync(guards[0])


def test_errors_of_this_rank_are_raised_as_they_are(
    guards: Guards, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="mine"), guards[0].collective("committing"):
        raise ValueError("mine")
    monkeypatch.setattr(guards[0], "ask", lambda: pytest.fail("it asked the other ranks"))
    with (
        pytest.raises(RuntimeError, match=r"^cannot reshape a tensor of 0 elements"),
        guards[0].operation("the sync to version 2"),
        guards[0].collective("gathering the adapter of 'gate'"),
    ):
        raise RuntimeError("cannot reshape a tensor of 0 elements")
    with guards[1].operation("the sync to version 2"):
        assert str(guards[1].failed_rank()) == (
            "rank 0 failed in the sync to version 2 while gathering the adapter of 'gate': "
            "RuntimeError: cannot reshape a tensor of 0 elements"
        )


def test_errors_of_a_rank_alone_are_raised_as_they_are() -> None:
    alone = CollectiveGuard(0, 1, dist.HashStore())
    with pytest.raises(RuntimeError, match="mine"), alone.collective("committing"):
        raise RuntimeError("mine")


def test_a_hang_report_has_the_line_of_the_main_thread(
    guards: Guards, capfd: pytest.CaptureFixture[str]
) -> None:
    guards[0].phase, guards[1].phase = "phase 'gen' of step 1", "phase 'reward' of step 1"
    assert guards[0].hang_report() == "rank 1 was killed or stalled"
    monitor = threading.Thread(target=guards[1].answer)
    monitor.start()
    monitor.join()
    report = guards[0].hang_report()
    assert report.startswith("rank 1 is in phase 'reward' of step 1, at ")
    assert os.path.basename(__file__) in report
    assert "rank 1 stalls in phase 'reward' of step 1; its stacks:" in capfd.readouterr().err
