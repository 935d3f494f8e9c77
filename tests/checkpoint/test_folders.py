"""Checkpoint folders: only complete ones count, the newest k and the best stay."""

import json

import pytest

from hybridengine.checkpoint import CheckpointError, find_checkpoints, open_checkpoint, resume_plan
from hybridengine.checkpoint.folders import partial, prune, publish

DATA = b"x" * 100


def save(root, step: int, score: float | None = None) -> None:
    (partial(root, step) / "tensors").mkdir(parents=True)
    (partial(root, step) / "tensors" / "data").write_bytes(DATA)
    publish(root, step, score)


def steps(root) -> list[int]:
    return [checkpoint.step for checkpoint in find_checkpoints(root)]


def test_what_is_incomplete_is_not_found(tmp_path):
    for step in (2, 4, 10):
        save(tmp_path, step)
    assert steps(tmp_path) == [2, 4, 10]
    (tmp_path / "global_step_10" / "tensors" / "data").write_bytes(DATA[1:])  # a cut copy
    (tmp_path / "global_step_4" / "complete.json").unlink()
    partial(tmp_path, 12).mkdir()  # killed while it was written
    assert steps(tmp_path) == [2]
    plan = resume_plan(tmp_path, "auto")
    assert plan.step == 2 and len(plan.skipped) == 2
    assert "global_step_10: tensors/data is missing or cut" in str(plan)
    assert resume_plan(tmp_path, "disable").step == 0
    assert resume_plan(tmp_path / "other", "auto").step == 0
    for step, message in ((10, "tensors/data is missing or cut, expected 100 bytes"),
                          (4, "never completed"), (7, "is no folder")):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / f"global_step_{step}")
        with pytest.raises(CheckpointError, match=message):
            resume_plan(tmp_path, "path", tmp_path / f"global_step_{step}")


@pytest.mark.parametrize(
    "content",
    ["", '{"step": 4, "fil', "[]", "null", '{"step": 4}', '{"files": {}}', '{"files": 3}',
     '{"step": 4, "score": null, "files": {"../../data": [100, 1]}}'],
)  # fmt: skip
def test_a_damaged_list_of_files_is_one_sentence(tmp_path, content):
    save(tmp_path, 2)
    save(tmp_path, 4)
    (tmp_path / "global_step_4" / "complete.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"global_step_4.*complete\.json"):
        open_checkpoint(tmp_path / "global_step_4")
    plan = resume_plan(tmp_path, "auto")
    assert plan.step == 2
    assert "global_step_4" in plan.skipped[0]


def test_a_checkpoint_without_checksums_is_named_as_such(tmp_path):
    save(tmp_path, 4)
    manifest = '{"step": 4, "score": null, "files": {"tensors/data": 100}}'
    (tmp_path / "global_step_4" / "complete.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="older version, without checksums"):
        open_checkpoint(tmp_path / "global_step_4")


def test_auto_does_not_start_anew_beside_damaged_checkpoints(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "global_step_2" / "complete.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"start anew with trainer\.resume_mode=disable"):
        resume_plan(tmp_path, "auto")


def test_changed_bytes_are_found_by_their_checksum(tmp_path):
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


def test_pruning_keeps_what_a_user_has_put_there(tmp_path):
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


def test_the_same_step_again_keeps_what_is_not_ours(tmp_path):
    save(tmp_path, 3, 0.1)
    (tmp_path / "global_step_3" / "complete.json").write_text("{")
    save(tmp_path, 3, 0.2)
    assert find_checkpoints(tmp_path)[0].score == 0.2
    assert (tmp_path / "previous-1" / "global_step_3" / "tensors" / "data").read_bytes() == DATA


def test_files_have_the_mode_that_the_umask_says(tmp_path):
    (tmp_path / "new").write_text("")
    wanted = (tmp_path / "new").stat().st_mode
    written = partial(tmp_path, 1)
    written.mkdir()
    (written / "data").write_bytes(DATA)
    (written / "data").chmod(0o600)  # as writers through temporary files leave it
    publish(tmp_path, 1, None)
    files = list((tmp_path / "global_step_1").iterdir())
    assert {file.stat().st_mode for file in files} == {wanted} and len(files) == 2
    manifest = json.loads((tmp_path / "global_step_1" / "complete.json").read_text())
    assert manifest["files"]["data"][0] == len(DATA)
