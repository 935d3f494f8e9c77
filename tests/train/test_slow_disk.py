"""A disk that is slower than trainer.timeout_s, or full at the end, costs no training."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridengine.run.errors import EXIT_STOPPED
from hybridengine.run.session import read_status
from hybridengine.train.checkpoint import find_checkpoints
from tests.extras.remote.overlapped import overrides_of, run_overlapped
from tests.ranks import message_of, run_ranks
from tests.train.in_process import small_job
from tests.train.sft_job import start_run, write_sft_job

pytestmark = pytest.mark.multirank

LIMIT_S = 240
STOPPED_JOB = 1000  # its number of steps


def write_slowly(rank: int, world_size: int, folder: Path) -> list[str]:
    """Train, with writes on rank 0 that take longer than rank 1 waits in a collective."""
    from torch.distributed import distributed_c10d

    from hybridengine.train.checkpoint import checkpointer, pretrained

    def run_slowly(run: Callable[..., Any], fn: Callable[[], Any], *rest: Any) -> Any:
        def slow() -> Any:
            time.sleep(1.0 if rank == 0 else 0.0)
            return fn()

        distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
        try:
            return run(slow, *rest)
        finally:
            distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S))

    pretrained.run_on_rank0 = partial(run_slowly, pretrained.run_on_rank0)
    write = checkpointer.save_random_state
    checkpointer.save_random_state = lambda file: time.sleep(rank == 0) or write(file)
    more = {"trainer.save_freq": 1, "trainer.save_hf_model": True}
    with contextlib.redirect_stdout(io.StringIO()):
        start_run(rank, world_size, folder, **more, **{"trainer.total_training_steps": 1}).train()
    return sorted(file.parent.name for file in (folder / "run").glob("*/complete.json"))


def test_the_other_ranks_wait_for_a_slow_writer(tmp_path: Path) -> None:
    for written in run_ranks(write_slowly, 2, write_sft_job(tmp_path)):
        assert written == ["final", "global_step_1"]


def hold_writes(folder: Path) -> None:
    """On rank 0, hold every write until the other rank has waited for longer than it may.

    The clock of the other rank jumps whenever it looks for work while rank 0 waits for its disk; or
    that rank has ended. Rank 0 stops a job of STOPPED_JOB steps after its second one.
    """
    import torch.distributed.checkpoint.filesystem as filesystem

    from hybridengine.remote.roles import RoleLink
    from hybridengine.run import messages
    from hybridengine.train.checkpoint import pretrained
    from hybridengine.train.rl import RLTrainer

    held, waited, is_main = folder / "held", folder / "waited", os.environ["RANK"] == "0"

    def hold(write: Callable[..., Any], *args: Any) -> Any:
        if is_main:
            waited.unlink(missing_ok=True)
            held.touch()
            deadline = time.monotonic() + LIMIT_S
            while not waited.exists():
                status = read_status(folder / "stopped") or read_status(folder / "finished")
                if 1 in status and status[1].end:
                    break
                assert time.monotonic() < deadline, "the other rank neither waits nor has ended"
                time.sleep(0.01)
            held.unlink()
        return write(*args)

    for owner, name in (
        (filesystem.FileSystemWriter, "write_data"),
        (pretrained, "write_pretrained"),
    ):
        write = getattr(owner, name)
        call = partial(hold, write)
        setattr(owner, name, call if owner is pretrained else lambda *a, call=call: call(*a))
    if is_main:
        signals = RLTrainer.stop_signal

        def stop_signal(self: Any) -> Any:
            stops = self.steps == STOPPED_JOB and self.session.step == 2
            return signal.SIGTERM if stops else signals(self)

        RLTrainer.stop_signal = stop_signal
        return
    ahead, looks, ask = 0.0, 0, RoleLink.is_writing

    def is_writing(self: RoleLink) -> bool:
        nonlocal ahead, looks
        if (found := ask(self)) and held.exists():
            ahead, looks = ahead + 0.4 * self.timeout_s, looks + 1
            if looks % 5 == 0:
                waited.touch()
        return found

    RoleLink.is_writing = is_writing
    messages.time = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead, sleep=time.sleep)


ENGINE = ("trainer.mode=one_step_off", "rollout.n_gpus_per_node=1")
CRITIC = ("algorithm.adv_estimator=gae", "critic.n_gpus_per_node=1")


@pytest.mark.parametrize("role", [ENGINE, CRITIC], ids=["engine", "critic"])
def test_ranks_of_other_roles_wait_for_a_slow_disk(tmp_path: Path, role: tuple[str, ...]) -> None:
    """As checkpoints and final/ are written, and as a signal stops the run."""
    base, finished = small_job(tmp_path), ("trainer.total_training_steps=2",)
    stopped = (f"trainer.total_training_steps={STOPPED_JOB}", "trainer.save_freq=-1")
    jobs = [
        overrides_of(tmp_path, base, name, (*role, "trainer.save_freq=1", *more))
        for name, more in (("finished", finished), ("stopped", stopped))
    ]
    results = run_overlapped(tmp_path, jobs, 2, before=partial(hold_writes, tmp_path))
    assert [result.refused for result in results] == ["", f"exit code {EXIT_STOPPED}"]
    written = {f"global_step_{k}/complete.json" for k in (1, 2)} | {"final/complete.json"}
    assert written <= results[0].files
    assert "global_step_2/complete.json" in results[1].files
    for result in results:
        assert not [name for name in result.files if ".partial" in name]


def fail_to_export(rank: int, world_size: int, folder: Path) -> tuple[str, list[int], list[int]]:
    """Return the error of a run whose disk is full at the end, and its checkpoints.

    Then those of the same run again, which exports.
    """
    from hybridengine.train.checkpoint import pretrained

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    write, pretrained.write_pretrained = pretrained.write_pretrained, full
    two = {"trainer.total_training_steps": 2}
    with contextlib.redirect_stdout(io.StringIO()):
        message = message_of(start_run(rank, world_size, folder, **two).train)
        left = [c.step for c in find_checkpoints(folder / "run")]
        pretrained.write_pretrained = write
        start_run(rank, world_size, folder, **two).train()
        other = {**two, "trainer.default_local_dir": folder / "other"}
        start_run(rank, world_size, folder, **other).train()
    return message, left, [c.step for c in find_checkpoints(folder / "other")]


def test_a_failed_export_loses_no_training(tmp_path: Path) -> None:
    from hybridengine.lab.export import export_checkpoint

    [(message, left, not_asked_for)] = run_ranks(fail_to_export, 1, write_sft_job(tmp_path))
    saved, final = tmp_path / "run" / "global_step_2", tmp_path / "run" / "final"
    assert message.startswith("ModelError: saving the model to ") and "No space left" in message
    assert f"nothing is lost: `hybridengine export {saved} --out {final}` exports" in message
    assert left == [2] and not_asked_for == []
    export_checkpoint(saved, tmp_path / "exported")
    weights = [
        f / "model.safetensors"
        for f in (final, tmp_path / "exported", tmp_path / "other" / "final")
    ]
    assert len({file.read_bytes() for file in weights}) == 1
