"""Checkpoint folders: whole or not there, newest k and the best kept.

`<root>/global_step_<N>/` is written under a hidden name and renamed at the end; its `complete.json`
names every file with its size, so that a folder cut by a kill or by a copy never passes for whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridengine.errors import UserError
from hybridengine.model.export import give_name

__all__ = ["CheckpointError", "SavedCheckpoint", "find_checkpoints", "open_checkpoint", "partial"]

_MARKER = "complete.json"


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found or read; the message says which and why."""


@dataclass(frozen=True)
class SavedCheckpoint:
    step: int
    path: Path
    score: float | None  # of the validation at that step, larger is better; None: not validated


def partial(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is whole."""
    return root / f".global_step_{step}.partial"


def open_checkpoint(path: str | Path) -> SavedCheckpoint:
    """The whole checkpoint in the folder `path`; CheckpointError, saying what is missing."""
    path = Path(path)
    try:
        marker = json.loads((path / _MARKER).read_text())
    except FileNotFoundError:
        what = "is no folder" if not path.is_dir() else f"has no {_MARKER}: it was never completed"
        raise CheckpointError(f"checkpoint {path} {what}; choose another one") from None
    for name, size in marker["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            raise CheckpointError(
                f"checkpoint {path}: {name} is missing or cut, expected {size} bytes; copy it again"
            )
    return SavedCheckpoint(marker["step"], path, marker["score"])


def find_checkpoints(root: str | Path) -> list[SavedCheckpoint]:
    """Every whole checkpoint under `root`, by step; what is not whole is left out."""
    found = []
    for path in Path(root).glob("global_step_*"):
        try:
            found.append(open_checkpoint(path))
        except CheckpointError:
            continue
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def publish(root: Path, step: int, score: float | None) -> None:
    """Let the partial checkpoint of `step`, whose files are all written, take its name."""
    written = partial(root, step)
    files = {
        str(file.relative_to(written)): file.stat().st_size
        for file in sorted(written.rglob("*"))
        if file.is_file()
    }
    marker: Mapping[str, object] = {"step": step, "score": score, "files": files}
    (written / _MARKER).write_text(json.dumps(marker, indent=1))
    give_name(written, root / f"global_step_{step}")


def prune(root: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the one with the best score."""
    there = find_checkpoints(root)
    scored = [c for c in there if c.score is not None]
    best = max(scored, key=lambda c: (c.score, c.step), default=None)
    for checkpoint in there[: -keep if keep else 0]:
        if checkpoint is not best:
            shutil.rmtree(checkpoint.path)
