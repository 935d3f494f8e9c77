"""Checkpoint folders: only complete ones are used; the newest k and the best are kept."""

import json
import re
import shutil
from contextlib import suppress

import pytest

from hybridengine.run import activity
from hybridengine.run.errors import ModelError
from hybridengine.run.launch import temporary_folder
from hybridengine.run.storage import check_disk_space, free_space
from hybridengine.train.checkpoint import CheckpointError, find_checkpoints, resume_plan
from hybridengine.train.checkpoint.folders import open_checkpoint, partial_folder, prune, publish

DATA = b"x" * 100


def save(root, step: int, score: float | None = None) -> None:
    (partial_folder(root, step) / "tensors").mkdir(parents=True)
    (partial_folder(root, step) / "tensors" / "data").write_bytes(DATA)
    publish(root, step, score)


def steps(root) -> list[int]:
    return [checkpoint.step for checkpoint in find_checkpoints(root)]


def test_incomplete_checkpoints_are_not_listed(tmp_path):
    for step in (2, 4, 10):
        save(tmp_path, step)
    assert steps(tmp_path) == [2, 4, 10]
    (tmp_path / "global_step_10" / "tensors" / "data").write_bytes(DATA[1:])  # a cut copy
    (tmp_path / "global_step_4" / "complete.json").unlink()
    partial_folder(tmp_path, 12).mkdir()  # killed while it was written
    assert steps(tmp_path) == [2]
    plan = resume_plan(tmp_path, "auto")
    assert plan.step == 2 and len(plan.skipped) == 2
    assert "global_step_10: tensors/data is missing or truncated" in str(plan)
    assert resume_plan(tmp_path, "disable").step == 0
    assert resume_plan(tmp_path / "other", "auto").step == 0
    for step, message in (
        (10, "tensors/data is missing or truncated, expected 100 bytes"),
        (4, "never completed"),
        (7, "does not exist"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / f"global_step_{step}")
        with pytest.raises(CheckpointError, match=message):
            resume_plan(tmp_path, "path", tmp_path / f"global_step_{step}")


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"step": 4, "fil',
        "[]",
        "null",
        '{"step": 4}',
        '{"files": {}}',
        '{"files": 3}',
        '{"step": 4, "score": null, "files": {"../../data": [100, 1]}}',
    ],
)
def test_a_damaged_manifest_is_reported_in_one_sentence(tmp_path, content):
    save(tmp_path, 2)
    save(tmp_path, 4)
    (tmp_path / "global_step_4" / "complete.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"global_step_4.*complete\.json"):
        open_checkpoint(tmp_path / "global_step_4")
    plan = resume_plan(tmp_path, "auto")
    assert plan.step == 2
    assert "global_step_4" in plan.skipped[0]


def test_a_checkpoint_without_checksums_is_reported(tmp_path):
    save(tmp_path, 4)
    manifest = '{"step": 4, "score": null, "files": {"tensors/data": 100}}'
    (tmp_path / "global_step_4" / "complete.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="older version, without checksums"):
        open_checkpoint(tmp_path / "global_step_4")


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def test_every_flipped_bit_of_a_manifest_is_noticed_or_changes_nothing(tmp_path):
    save(tmp_path, 6, 0.5)
    folder = tmp_path / "global_step_6"
    written, saved = (folder / "complete.json").read_bytes(), open_checkpoint(folder)
    for bit in range(8 * len(written)):
        (folder / "complete.json").write_bytes(flipped(written, bit))
        with suppress(CheckpointError):
            assert open_checkpoint(folder) == saved, bit


def test_a_manifest_of_another_step_is_not_resumed_from(tmp_path):
    save(tmp_path, 4)
    save(tmp_path, 6)
    file = tmp_path / "global_step_6" / "complete.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({**manifest, "step": 7}))
    with pytest.raises(CheckpointError, match="its checksum differs from its content"):
        open_checkpoint(file.parent)
    old = {name: value for name, value in manifest.items() if name != "checksum"}
    file.write_text(json.dumps({**old, "step": 7}))
    with pytest.raises(CheckpointError, match=r"is of step 7, .* its name global_step_7"):
        open_checkpoint(file.parent)
    assert resume_plan(tmp_path, "auto").step == 4
    file.write_text(json.dumps(old))  # of an older version, without a checksum of its own
    assert resume_plan(tmp_path, "auto").step == 6
    file.parent.rename(tmp_path / "best")
    assert resume_plan(tmp_path, "path", tmp_path / "best").step == 6


def test_pruning_removes_links_and_not_what_they_point_to(tmp_path):
    run, disk = tmp_path / "run", tmp_path / "disk"
    for step in (1, 2, 3):
        save(run, step)
    disk.mkdir()
    shutil.move(run / "global_step_1", disk / "one")
    (run / "global_step_1").symlink_to(disk / "one")
    shutil.move(run / "global_step_2" / "tensors", disk / "tensors")
    (run / "global_step_2" / "tensors").symlink_to(disk / "tensors")
    prune(run, 1)
    assert [path.name for path in run.iterdir()] == ["global_step_3"]
    open_checkpoint(disk / "one").verify()
    assert (disk / "tensors" / "data").read_bytes() == DATA


def test_auto_does_not_start_anew_with_damaged_checkpoints(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "global_step_2" / "complete.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"start anew with trainer\.resume_mode=disable"):
        resume_plan(tmp_path, "auto")


def test_checksums_detect_changed_bytes(tmp_path):
    save(tmp_path, 2)
    data = tmp_path / "global_step_2" / "tensors" / "data"
    checkpoint = open_checkpoint(tmp_path / "global_step_2")
    checkpoint.verify()
    data.write_bytes(DATA[:50] + b"y" + DATA[51:])
    with pytest.raises(CheckpointError, match="tensors/data is damaged"):
        open_checkpoint(tmp_path / "global_step_2").verify()
    checkpoint.verify([])


def test_the_newest_and_the_best_stay(tmp_path):
    scores = ((1, 0.5), (2, 0.9), (3, None), (4, 0.1), (5, float("nan")))
    for step, score in scores:
        save(tmp_path, step, score)
    prune(tmp_path, None)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    prune(tmp_path, 2)
    assert steps(tmp_path) == [2, 4, 5]
    prune(tmp_path, 1)
    assert steps(tmp_path) == [2, 5]


def test_pruning_keeps_foreign_files(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    notes = tmp_path / "global_step_1" / "my" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("keep")
    prune(tmp_path, 1)
    assert steps(tmp_path) == [2]
    assert [p for p in notes.parents[1].rglob("*") if p.is_file()] == [notes]


def test_the_same_step_again_replaces(tmp_path):
    save(tmp_path, 3, 0.1)
    save(tmp_path, 3, 0.2)
    [checkpoint] = find_checkpoints(tmp_path)
    assert checkpoint.score == 0.2
    assert [p.name for p in tmp_path.iterdir()] == ["global_step_3"]


def test_the_same_step_again_keeps_foreign_files(tmp_path):
    save(tmp_path, 3, 0.1)
    (tmp_path / "global_step_3" / "complete.json").write_text("{")
    save(tmp_path, 3, 0.2)
    assert find_checkpoints(tmp_path)[0].score == 0.2
    assert (tmp_path / "previous-1" / "global_step_3" / "tensors" / "data").read_bytes() == DATA


def test_files_have_the_mode_of_the_umask(tmp_path):
    (tmp_path / "new").write_text("")
    wanted = (tmp_path / "new").stat().st_mode
    written = partial_folder(tmp_path, 1)
    written.mkdir()
    (written / "data").write_bytes(DATA)
    (written / "data").chmod(0o600)  # as writers through temporary files leave it
    publish(tmp_path, 1, None)
    files = list((tmp_path / "global_step_1").iterdir())
    assert {file.stat().st_mode for file in files} == {wanted} and len(files) == 2
    manifest = json.loads((tmp_path / "global_step_1" / "complete.json").read_text())
    assert manifest["files"]["data"][0] == len(DATA)


def test_a_killed_process_leaves_no_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(activity, "SHARED_MEMORY", tmp_path)
    with temporary_folder() as first, temporary_folder() as second:
        left = first.with_name("4194305.left")  # no process has that number
        left.mkdir()
        (left / "record").touch()
        activity.remove_stale(first.parent)  # every rank does, as it starts
        assert {path.name for path in first.parent.iterdir()} == {first.name, second.name}
    assert list(first.parent.iterdir()) == []


def test_disk_space(tmp_path):
    check_disk_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(ModelError, match=r"free, needs 1073741824\.0 GiB"):
        check_disk_space(tmp_path / "not" / "yet", 1 << 60)
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is not writable"):
        check_disk_space(tmp_path / "file" / "below", 1)


def test_free_space_of_a_folder_that_another_rank_removes(tmp_path, monkeypatch):
    folder, usage = tmp_path / "global_step_2.partial", shutil.disk_usage
    folder.mkdir()

    def remove_first(path):
        shutil.rmtree(folder, ignore_errors=True)
        return usage(path)

    monkeypatch.setattr(shutil, "disk_usage", remove_first)
    assert re.fullmatch(r"\d+(\.\d)? \w+ free", free_space(folder / "tensors"))
    (tmp_path / "file").touch()
    assert free_space(tmp_path / "file" / "below").endswith(" free")
