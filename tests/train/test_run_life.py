"""Runs in one folder: resumed, finished, started anew; and runs whose gradients are not finite."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hybridengine.train import sft
from tests.forked import run_forked
from tests.ranks import message_of, run_ranks
from tests.tensors import whole
from tests.train.sft_job import sft_settings, start_run, write_sft_job

pytestmark = pytest.mark.multirank


def train_one_after_another(
    rank: int, world_size: int, folder: Path, runs: list[dict[str, Any]]
) -> list[tuple[str, dict[str, Any], list[int]]]:
    """Per run: its output, its summary, and the steps in metrics.jsonl."""
    results = []
    for overrides in runs:
        common = {"data.val_files": folder / "rows.jsonl", "trainer.logger": "[jsonl,console]"}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            start_run(rank, world_size, folder, **common, **overrides).train()
        rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        steps = [row["step"] for row in rows if "train/loss" in row]
        summary = json.loads((folder / "run" / "summary.json").read_text())
        results.append((printed.getvalue(), summary, steps))
    return results


def seconds_after_resume(rank: int, world_size: int, folder: Path) -> float:
    """Return the seconds of a run that resumes after 1e6 seconds."""
    run = start_run(rank, world_size, folder)
    run.load_state_dict({"seconds": 1e6})
    return run.state_dict()["seconds"]


def train_by_the_clock(rank: int, world_size: int, folder: Path) -> tuple[Any, Any, float]:
    """Return the summary, the metrics and the resumed seconds of a run under a clock that its parts
    alone advance."""
    from types import SimpleNamespace

    from hybridengine.run import session
    from hybridengine.train import base, report

    now = 0.0
    time = SimpleNamespace(perf_counter=lambda: now, time=lambda: now)
    session.time = base.time = time

    def takes(owner: Any, name: str, seconds: float) -> None:
        call = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            nonlocal now
            now += seconds
            return call(*args, **options)

        setattr(owner, name, slow)

    run = start_run(
        rank,
        world_size,
        folder,
        **{
            "data.val_files": folder / "rows.jsonl",
            "trainer.total_training_steps": 3,
            "trainer.test_freq": 2,
            "trainer.save_freq": 2,
        },
    )
    run.load_state_dict({"seconds": 7.0, "timing_s": {"start": 5.0, "step": 2.0}})
    takes(run.checkpoints, "resume", 1)
    takes(run, "collect", 10)
    takes(run.optimizer, "step", 100)
    takes(run, "loss_of", 1e3)
    takes(run.checkpoints, "save", 1e4)
    takes(run.checkpoints, "wait", 1e5)
    takes(report, "save_pretrained", 1e6)

    def validate(step: int) -> tuple[float, dict[str, float]]:
        with run.session.phase("gen"):  # inside the validation, as of an RL run
            return 0.0, {"val/loss": run.loss_of(run.val)}

    run.validate = validate
    with contextlib.redirect_stdout(io.StringIO()):
        run.train()
    rows = [*map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())]
    return json.loads((folder / "run" / "summary.json").read_text()), rows, now


def test_the_times_of_a_run_add_up(tmp_path: Path) -> None:
    [(summary, rows, now)] = run_ranks(train_by_the_clock, 1, write_sft_job(tmp_path))
    waited = summary["timing_s"]["save_checkpoint"] - 2e4  # of two saves
    assert waited > 0 and waited % 1e5 == 0
    spent = {"start": 6.0, "step": 332.0, "testing": 3e3, "export": 1e6, "other": 0.0}
    spent["save_checkpoint"] = 2e4 + waited
    assert summary["timing_s"] == spent
    assert summary["seconds"] == sum(spent.values()) == now + 7
    times = {n: [row[n] for row in rows if n in row] for n in ("timing_s/step", "timing_s/testing")}
    assert times == {"timing_s/step": [110.0] * 3, "timing_s/testing": [1e3] * 3}
    assert not any("timing_s/gen" in row for row in rows)


def test_resumed_finished_and_new_runs(tmp_path: Path) -> None:
    folder = write_sft_job(tmp_path)
    saving = {"trainer.save_freq": 1}
    short = {"trainer.total_training_steps": 2}
    longer = {"trainer.total_training_steps": 4}
    changed = {"optim.weight_decay": 0.5}
    anew = {"trainer.resume_mode": "disable"}
    first, again, resumed, new, unsaved = run_ranks(
        train_one_after_another,
        1,
        folder,
        [
            {**saving, **short},
            {**saving, **short, **changed},
            {**saving, **longer, **changed},
            {**short, **anew},
            short,
        ],
    )[0]
    assert first[2] == [1, 2] and first[1]["resumed_after_step"] is None
    assert "nothing was trained" in again[0] and "raise trainer.total_training_steps" in again[0]
    assert "without effect: optim.weight_decay: 0.01 → 0.5" in again[0]
    assert again[1:] == first[1:]
    assert "resumed after step 2" in resumed[0]
    assert "changed since: optim.weight_decay: 0.01 → 0.5" in resumed[0]
    assert resumed[2] == [1, 2, 3, 4] and resumed[1]["resumed_after_step"] == 2
    previous = folder / "run" / "previous-1"
    state = json.loads((previous / "global_step_2" / "state.json").read_text())
    assert resumed[1]["seconds"] > state["run"]["seconds"], "of the whole run"
    assert run_ranks(seconds_after_resume, 1, folder)[0] > 1e6
    assert f"was moved to {previous}" in new[0]
    assert new[2] == [1, 2]
    assert (previous / "global_step_4" / "complete.json").is_file()
    assert (previous / "final" / "config.json").is_file()
    assert len((previous / "metrics.jsonl").read_text().splitlines()) > 4
    assert (folder / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "was moved to" in unsaved[0] and unsaved[2] == [1, 2], "without any checkpoint too"
    assert (folder / "run" / "previous-2" / "final" / "config.json").is_file()
    modes = {f.stat().st_mode & 0o777 for f in (folder / "run" / "final").iterdir()}
    (folder / "plain").write_text("")
    assert modes == {(folder / "plain").stat().st_mode & 0o777}


def diverge(
    rank: int, world_size: int, folder: Path, runs: list[tuple[set[int], int]]
) -> list[tuple[str, bool]]:
    """Return per run, given by its bad steps and its steps: the error or "", whether the weights
    are unchanged."""
    return [diverge_once(rank, world_size, folder, *run) for run in runs]


def diverge_once(
    rank: int, world_size: int, folder: Path, bad_steps: set[int], steps: int
) -> tuple[str, bool]:
    run = start_run(rank, world_size, folder, **{"trainer.total_training_steps": steps})
    before = [whole(p).detach().clone() for p in run.model.parameters()]
    loss_of = sft.packed_cross_entropy

    def spoiled(*arguments: Any) -> Any:
        return loss_of(*arguments) * (math.nan if run.session.step in bad_steps else 1.0)

    message = ""
    with patch.object(sft, "packed_cross_entropy", spoiled):
        try:
            run.train()
        except ValueError as error:
            message = str(error)
    after = [whole(p) for p in run.model.parameters()]
    return message, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "train/loss" in row]


def test_updates_that_are_not_finite_are_counted_and_end_the_run(tmp_path: Path) -> None:
    folder = write_sft_job(tmp_path)
    for [(message, unchanged)] in run_ranks(diverge, 2, folder, [(set(range(1, 15)), 14)]):
        assert "of train were not finite in 10 updates in a row, since step 1, " in message
        assert "in step 10 the loss of train is nan" in message
        assert unchanged
    assert [row["train/skipped_updates"] for row in rows_of(folder)] == [1] * 10
    [[(message, unchanged)]] = run_ranks(diverge, 1, folder, [({2, 3, 9}, 10)])
    assert message == "" and not unchanged
    skipped = [row["step"] for row in rows_of(folder) if row["train/skipped_updates"]]
    assert skipped == [2, 3, 9]


def test_a_run_whose_last_updates_were_skipped_fails_and_keeps_its_state(tmp_path: Path) -> None:
    folder = write_sft_job(tmp_path)
    saved, final = folder / "run" / "global_step_6", folder / "run" / "final"
    for results in run_ranks(diverge, 2, folder, [({2, 5, 6}, 6)] * 2):
        for message, _ in results:  # the second start has no step left
            assert message.startswith(
                "the last 2 updates of train, since step 5, were all skipped (the loss of train is "
                "nan)"
            ), message
            assert f"`hybridengine export {saved} --out {final}`" in message
    assert (saved / "complete.json").is_file()
    assert not final.exists() and not (folder / "run" / "summary.json").exists()
    runs: list[tuple[set[int], int]] = [({7}, 8), ({9, 10}, 10), (set(), 10)]
    [[trained, skipped, finished]] = run_ranks(diverge, 1, folder, runs)
    assert trained == ("", False), "a later update was made"
    assert final.is_dir()
    assert skipped[0].startswith("the last 2 updates of train, since step 9, ")
    assert finished[0].startswith("the last 2 updates"), "final/ is of an earlier part of the run"


@pytest.mark.parametrize(
    ("bad_steps", "steps", "fails"), [({4}, 4, False), ({1}, 1, True), ({1}, 2, False)]
)
def test_one_skipped_update_is_not_a_failure_unless_it_is_all(
    tmp_path: Path, bad_steps: set[int], steps: int, fails: bool
) -> None:
    [[(message, _)]] = run_ranks(diverge, 1, write_sft_job(tmp_path), [(bad_steps, steps)])
    assert message.startswith("the last update of train, since step 1, " if fails else ""), message
    assert (tmp_path / "run" / "final").exists() != fails


def train_half(rank: int, world_size: int, folder: Path, steps: int) -> tuple[str, str, float]:
    """Return the error of a float16 run that diverges, its output and its last loss scale."""
    more = {
        "optim.lr": 10.0,
        "model.fsdp_config.dtype": "float16",
        "trainer.logger": "[jsonl,console]",
    }
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run = start_run(rank, world_size, folder, **more, **{"trainer.total_training_steps": steps})
        message = message_of(run.train)
    return message, printed.getvalue(), run.optimizer.loss_scale


@pytest.mark.parametrize(("steps", "words"), [(14, "in 10 updates in a row"), (8, "the last ")])
def test_a_run_that_diverges_in_float16_fails(tmp_path: Path, steps: int, words: str) -> None:
    """The loss is NaN, whatever its scale is: this is no overflow of the gradients."""
    [(message, printed, scale)] = run_ranks(train_half, 1, write_sft_job(tmp_path), steps)
    assert message.startswith("ModelError: ") and words in message and "since step" in message
    assert "the loss of train is " in message
    assert "warning: step 2: the loss of train is " in printed, printed
    assert scale == 2.0**16
    assert not (tmp_path / "run" / "final").exists()


def test_the_launcher_reports_a_run_that_diverged_as_failed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    more = {
        "optim.lr": 10.0,
        "model.fsdp_config.dtype": "float16",
        "trainer.total_training_steps": 5,
    }
    settings = sft_settings(write_sft_job(tmp_path), **more)
    command = [sys.executable, "-m", "hybridengine", "sft", tmp_path / "config.yaml", *settings]
    run = run_forked(command)
    last = run.stderr.splitlines()[-1]
    assert run.returncode == 1, run.stderr
    assert last.startswith("error: rank 0 (pid ") and " of step 5: " in last, run.stderr
    assert "of train, since step " in last and "lower the learning rate" in last
    assert (tmp_path / "run" / "global_step_5" / "complete.json").is_file()
    assert not (tmp_path / "run" / "final").exists()


def load_nan(rank: int, world_size: int, folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        start_run(rank, world_size, folder)
    return str(error.value)


def test_weights_that_are_not_finite_are_named_at_load(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_sft_job(tmp_path)
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.fc1.weight"
    weights[name][3, 4] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    for message in run_ranks(load_nan, 2, folder):
        assert f"{name} contains NaN or infinity" in message
        assert str(folder / "model") in message and "\n" not in message
