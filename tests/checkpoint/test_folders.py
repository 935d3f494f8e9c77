"""Checkpoint folders: only whole ones count, the newest k and the best stay."""

import pytest

from hybridengine.checkpoint import (
    CheckpointError,
    chosen_checkpoint,
    find_checkpoints,
    open_checkpoint,
)
from hybridengine.checkpoint.folders import partial, prune, publish


def save(root, step: int, score: float | None = None) -> None:
    (partial(root, step) / "tensors").mkdir(parents=True)
    (partial(root, step) / "tensors" / "data").write_bytes(b"x" * 100)
    publish(root, step, score)


def steps(root) -> list[int]:
    return [checkpoint.step for checkpoint in find_checkpoints(root)]


def test_what_is_not_whole_is_not_found(tmp_path):
    for step in (2, 4, 10):
        save(tmp_path, step)
    assert steps(tmp_path) == [2, 4, 10]
    (tmp_path / "global_step_10" / "tensors" / "data").write_bytes(b"x" * 99)  # a cut copy
    (tmp_path / "global_step_4" / "complete.json").unlink()
    partial(tmp_path, 12).mkdir()  # killed while it was written
    assert steps(tmp_path) == [2]
    assert chosen_checkpoint(tmp_path, "auto").step == 2
    assert chosen_checkpoint(tmp_path, "disable") is None
    assert chosen_checkpoint(tmp_path / "other", "auto") is None
    for step, message in ((10, "tensors/data is missing or cut, expected 100 bytes"),
                          (4, "never completed"), (7, "is no folder")):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / f"global_step_{step}")
        with pytest.raises(CheckpointError, match=message):
            chosen_checkpoint(tmp_path, "path", tmp_path / f"global_step_{step}")


def test_the_newest_and_the_best_stay(tmp_path):
    for step, score in ((1, 0.5), (2, 0.9), (3, None), (4, 0.1), (5, 0.2)):
        save(tmp_path, step, score)
    prune(tmp_path, None)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    prune(tmp_path, 2)
    assert steps(tmp_path) == [2, 4, 5]
    prune(tmp_path, 1)
    assert steps(tmp_path) == [2, 5]


def test_the_same_step_again_replaces(tmp_path):
    save(tmp_path, 3, 0.1)
    save(tmp_path, 3, 0.2)
    [checkpoint] = find_checkpoints(tmp_path)
    assert checkpoint.score == 0.2
    assert not list(tmp_path.glob(".global_step_*"))
