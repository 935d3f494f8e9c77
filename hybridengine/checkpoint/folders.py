"""Checkpoint folders: complete or absent, newest k and the best kept.

`<root>/global_step_<N>/` is written under a hidden name and renamed at the end; its `complete.json`
names every file with its size and checksum, so that a folder cut by a kill or by a copy, or damaged
later, never passes for complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridengine.errors import UserError
from hybridengine.storage import (
    StorageError,
    damage,
    read_manifest,
    remove_folder,
    replace_folder,
    seal,
)

__all__ = [
    "CheckpointError",
    "SavedCheckpoint",
    "find_checkpoints",
    "list_checkpoints",
    "open_checkpoint",
    "partial",
    "prune",
    "publish",
]


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found or read; the message says which and why."""


@dataclass(frozen=True)
class SavedCheckpoint:
    step: int
    path: Path
    score: float | None  # of the validation at that step, larger is better; None: not validated
    files: Mapping[str, list[int]]  # [bytes, CRC-32] by name

    def verify(self, names: list[str] | None = None) -> None:
        """Compare the checksums of all files, or of `names`; CheckpointError for a difference."""
        records = {n: self.files[n] for n in (self.files if names is None else names)}
        if fault := damage(self.path, records, checksums=True):
            raise CheckpointError(f"checkpoint {self.path}: {fault}")


def partial(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return root / f".global_step_{step}.partial"


def open_checkpoint(path: str | Path) -> SavedCheckpoint:
    """The checkpoint in the folder `path`, all of whose files are there in their full size.

    Raises CheckpointError, saying what is missing.
    """
    path = Path(path)
    try:
        manifest = read_manifest(path)
    except StorageError as error:
        raise CheckpointError(f"checkpoint {path} {error}; choose another one") from None
    step, score = manifest.get("step"), manifest.get("score")
    if not isinstance(step, int) or not isinstance(score, float | int | None):
        raise CheckpointError(f"{path} is no checkpoint: complete.json names no step")
    if fault := damage(path, manifest["files"], checksums=False):
        raise CheckpointError(f"checkpoint {path}: {fault}")
    return SavedCheckpoint(step, path, score, manifest["files"])


def list_checkpoints(root: str | Path) -> tuple[list[SavedCheckpoint], dict[Path, str]]:
    """Every checkpoint under `root`, by step; and why each other one there cannot be used."""
    found, unusable = [], {}
    for path in sorted(Path(root).glob("global_step_*")):
        try:
            found.append(open_checkpoint(path))
        except CheckpointError as error:
            unusable[path] = str(error)
    return sorted(found, key=lambda checkpoint: checkpoint.step), unusable


def find_checkpoints(root: str | Path) -> list[SavedCheckpoint]:
    """Every checkpoint under `root` that is complete, by step."""
    return list_checkpoints(root)[0]


def publish(
    root: Path,
    step: int,
    score: float | None,
    records: Mapping[str, list[int]] | None = None,
) -> None:
    """Let the partial checkpoint of `step`, whose files are all written, take its name.

    score: not finite is as not validated. records: of all its files, see `storage.seal`.
    """
    written = partial(root, step)
    score = score if score is not None and math.isfinite(score) else None
    seal(written, records, step=step, score=score)
    replace_folder(written, root / f"global_step_{step}")


def prune(root: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the one with the best score."""
    there = find_checkpoints(root)
    scored = [c for c in there if c.score is not None]
    best = max(scored, key=lambda c: (c.score, c.step), default=None)
    for checkpoint in there[: -keep if keep else 0]:
        if checkpoint is not best:
            remove_folder(checkpoint.path)
