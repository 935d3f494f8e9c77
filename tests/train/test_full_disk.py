"""A disk that becomes full: the message names file and space; the run resumes where it saved."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from tests.ranks import run_ranks
from tests.train.in_process import small_job

pytestmark = pytest.mark.multirank

STEPS, SAVED = 4, 2  # of a run that fails after step 2, and resumes after it
KIB = 1 << 10
NEW_MOUNTS, PRIVATE = 0x20000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE

Fill = Callable[[int | None], None]  # leave so many bytes; None: all of them


class Case(NamedTuple):
    """The disk is filled, but for `left` bytes, as step 3 ends, or after a call of `after`."""

    left: int
    after: str = ""
    overrides: tuple[str, ...] = ()


CASES = {
    "space": Case(64 * KIB),
    "tensors": Case(512 * KIB, "check_disk_space"),
    "manifest": Case(0, "file_records"),
    "rollouts": Case(0, "", ("trainer.save_freq=2",)),
}


class Outcome(NamedTuple):
    message: str
    checkpoints: list[int]
    leftovers: list[str]
    resumed_to: str  # error of the run that resumes
    steps: list[int]
    is_final: bool


def small_disk(folder: Path) -> Fill:
    """Mount a disk of 64 MiB at `folder`, which only this process sees; as root alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir(parents=True)
    if (
        libc.unshare(NEW_MOUNTS)
        or libc.mount(b"none", b"/", None, PRIVATE, None)
        or libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=64m")
    ):
        raise OSError(ctypes.get_errno(), "cannot mount")

    def fill(left: int | None) -> None:
        filler = folder / "filler"
        filler.unlink(missing_ok=True)
        disk = os.statvfs(folder)
        if left is not None:
            filler.write_bytes(bytes(disk.f_bavail * disk.f_bsize - left))

    return fill


def small_files(folder: Path) -> Fill:
    """No file may become larger than what is left, as under a quota; any user can do this."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    return lambda left: resource.setrlimit(
        resource.RLIMIT_FSIZE, (hard if left is None else left, hard)
    )


def train(base: list[str], run: Path, case: Case, fill: Fill | None) -> str:
    """Train from where the folder is; return the error, "" if there is none."""
    import torch.distributed as dist

    from hybridengine.run.config import load_config
    from hybridengine.run.errors import UserError
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.checkpoint import checkpointer, tensors
    from hybridengine.train.rl import RLTrainer

    overrides = (
        f"trainer.default_local_dir={run}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
        *case.overrides,
    )
    assert dist.get_world_size() == 1
    trainer = RLTrainer(load_config(None, [*base, *overrides]), Session(PhaseStatus(run, 0)))
    patches = contextlib.ExitStack()

    def on_step_end(step: int, metrics: Any) -> None:
        if fill is None or step != SAVED + 1:
            return
        if not case.after:
            return fill(case.left)
        module = next(m for m in (checkpointer, tensors) if hasattr(m, case.after))
        call = getattr(module, case.after)

        def then_fill(*args: Any) -> Any:
            result = call(*args)
            fill(case.left)
            return result

        patches.enter_context(mock.patch.object(module, case.after, then_fill))

    trainer.callbacks = {
        "on_step_end": on_step_end,
        "on_save": lambda step, folder: None,
    }  # waits for it
    with patches:
        try:
            trainer.train()
        except UserError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if fill is not None:
                fill(None)
    return ""


def run_on_a_small_disk(rank: int, world_size: int, base: list[str], disk: Path, kind: str) -> Any:
    from hybridengine.train import report
    from hybridengine.train.checkpoint import find_checkpoints

    report.plugins = lambda group: {}
    fill = None
    if kind == "disk":
        with contextlib.suppress(OSError):  # not as any user
            fill = small_disk(disk)
    reason = "No space left on device" if fill else "File too large"
    fill = fill or small_files(disk)
    outcomes = {}
    for name, case in CASES.items():
        run = disk / name
        with contextlib.redirect_stdout(io.StringIO()):
            message = train(base, run, case, fill)
            saved = [c.step for c in find_checkpoints(run)]
            hidden = (f for f in run.rglob(".*") if f.name not in (".status", ".metadata"))
            leftovers = [str(f.relative_to(run)) for f in hidden]
            again = train(base, run, case, None)
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        steps = [row["step"] for row in rows if "actor/pg_loss" in row]
        is_final = (run / "final" / "complete.json").is_file()
        outcomes[name] = Outcome(message, saved, leftovers, again, steps, is_final)
    return outcomes, log_until_full(disk, fill), reason


def log_until_full(folder: Path, fill: Fill) -> tuple[str, bool]:
    """Return the error of a log on a full disk, and whether a resumed run reads complete rows."""
    from rich.console import Console

    from hybridengine.run.errors import OutputError
    from hybridengine.run.tracking import MetricsLogger

    def logger(first_step: int) -> MetricsLogger:
        return MetricsLogger(folder, ["jsonl"], Console(quiet=True), 9999, first_step)

    fill(6 * KIB)
    message = ""
    with logger(0) as log:
        for step in range(1, 9999):
            try:
                log.log(step, {f"metric {i}": 1.0 for i in range(9)})
            except OutputError as error:
                message = str(error)
                break
    fill(None)
    with logger(9999) as log:
        return message, [row["step"] for row in log.history] == list(range(1, step))


@pytest.mark.parametrize("kind", ["disk", pytest.param("files", marks=pytest.mark.exhaustive)])
def test_a_full_disk_costs_the_running_step(tmp_path: Path, kind: str) -> None:
    disk = tmp_path / "disk"
    [result] = run_ranks(run_on_a_small_disk, 1, small_job(tmp_path), disk, kind)
    outcomes, (log_message, rows_are_complete), reason = result
    for name, outcome in outcomes.items():
        message, run = outcome.message, disk / name
        if name == "rollouts":
            assert message.startswith(
                f"OutputError: '{run}/rollouts/step_4.jsonl' cannot be written: {reason} ("
            ), message
        else:
            assert message.startswith("CheckpointError: saving "), message
            assert f"{run}/" in message and "failed on rank 0: " in message, message
        assert message.endswith(" free)"), message
        assert outcome.checkpoints == [1, 2] if name != "rollouts" else [2], name
        assert not outcome.leftovers, outcome.leftovers
        assert outcome.resumed_to == "" and outcome.is_final
        assert outcome.steps == [*range(1, STEPS + 1)], name
    assert log_message.startswith(f"'{disk}/metrics.jsonl' cannot be written: {reason} (")
    assert rows_are_complete
