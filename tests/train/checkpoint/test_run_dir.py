"""A run that begins in a used folder: nothing of the earlier one is lost, nothing is mixed."""

from __future__ import annotations

from pathlib import Path

from hybridengine.train.checkpoint import SavedCheckpoint, find_checkpoints
from hybridengine.train.checkpoint.folders import archive_earlier_run, partial_folder, publish


def used_folder(dir: Path, rollouts: Path) -> None:
    """As a run of four steps, saved every two, leaves it."""
    for step in (2, 4):
        partial_folder(dir, step).mkdir(parents=True)
        (partial_folder(dir, step) / "state.json").write_text("{}")
        publish(dir, step, None)
    rollouts.mkdir(exist_ok=True)
    for step in range(1, 5):
        (rollouts / f"step_{step}.jsonl").write_text("{}\n")
    (rollouts / "val_4.jsonl").write_text("{}\n")
    for name in ("metrics.jsonl", "config.yaml", "summary.json", "curves.png"):
        (dir / name).write_text(name)
    (dir / "final").mkdir()
    (dir / "final" / "config.json").write_text("{}")
    (dir / "notes.txt").write_text("a user's own")


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def saved(dir: Path, step: int) -> SavedCheckpoint:
    return next(c for c in find_checkpoints(dir) if c.step == step)


def test_a_new_run_moves_everything_aside(tmp_path: Path) -> None:
    used_folder(tmp_path, tmp_path / "rollouts")
    before = files(tmp_path)
    assert archive_earlier_run(tmp_path, tmp_path / "rollouts", None) == tmp_path / "previous-1"
    assert files(tmp_path / "previous-1") == before - {"notes.txt"}
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["notes.txt"]
    assert find_checkpoints(tmp_path) == []
    assert [c.step for c in find_checkpoints(tmp_path / "previous-1")] == [2, 4]
    used_folder(tmp_path, tmp_path / "rollouts")
    assert archive_earlier_run(tmp_path, tmp_path / "rollouts", None) == tmp_path / "previous-2"


def test_the_newest_checkpoint_continues_the_run(tmp_path: Path) -> None:
    used_folder(tmp_path, tmp_path / "rollouts")
    before = files(tmp_path)
    assert archive_earlier_run(tmp_path, tmp_path / "rollouts", saved(tmp_path, 4)) is None
    assert files(tmp_path) == before


def test_an_older_checkpoint_leaves_the_later_steps_aside(tmp_path: Path) -> None:
    used_folder(tmp_path, tmp_path / "rollouts")
    archive_earlier_run(tmp_path, tmp_path / "rollouts", saved(tmp_path, 2))
    assert [c.step for c in find_checkpoints(tmp_path)] == [2]
    assert [c.step for c in find_checkpoints(tmp_path / "previous-1")] == [4]
    assert {f for f in files(tmp_path) if f.startswith("rollouts")} == {
        "rollouts/step_1.jsonl",
        "rollouts/step_2.jsonl",
    }
    assert {
        "rollouts/step_3.jsonl",
        "rollouts/step_4.jsonl",
        "rollouts/val_4.jsonl",
        "metrics.jsonl",
        "final/config.json",
        "summary.json",
    } <= files(tmp_path / "previous-1")
    assert (tmp_path / "metrics.jsonl").exists()


def test_a_checkpoint_of_another_folder_starts_a_new_run_here(tmp_path: Path) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    used_folder(here, here / "rollouts")
    used_folder(other, other / "rollouts")
    assert archive_earlier_run(here, here / "rollouts", saved(other, 4)) == here / "previous-1"
    assert find_checkpoints(here) == []
    assert len(find_checkpoints(other)) == 2


def test_rollouts_of_a_folder_of_their_own_are_moved_within_it(tmp_path: Path) -> None:
    dir, rollouts = tmp_path / "run", tmp_path / "rollouts"
    dir.mkdir()
    used_folder(dir, rollouts)
    (rollouts / "notes.txt").write_text("a user's own")
    archive_earlier_run(dir, rollouts, None)
    assert {p.name for p in rollouts.iterdir()} == {"previous-1", "notes.txt"}
    assert len(files(rollouts / "previous-1")) == 5


def test_a_start_that_left_nothing_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "rollouts").mkdir()
    assert archive_earlier_run(tmp_path, tmp_path / "rollouts", None) is None
    assert not (tmp_path / "previous-1").exists()


def test_temporary_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    used_folder(tmp_path, tmp_path / "rollouts")
    before = files(tmp_path)
    left = (".curves.123.png", ".summary.7.json", "rollouts/.step_5.99.jsonl")
    own = {".notes.2024.txt", ".curves.old.png"}
    for name in (*left, *own):
        (tmp_path / name).touch()
    archive_earlier_run(tmp_path, tmp_path / "rollouts", saved(tmp_path, 4))
    assert files(tmp_path) == before | own
