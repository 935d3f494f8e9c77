"""What an earlier run has left in the folder of one that begins: kept, never mixed with the new."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from hybridengine.checkpoint import SavedCheckpoint
from hybridengine.storage import set_aside

__all__ = ["set_earlier_run_aside"]

_RESULTS = ("final", "final_adapter", "summary.json", "curves.png")
_LOGS = ("metrics.jsonl", "config.yaml", "rollouts", "tensorboard")
_NUMBERED = re.compile(r"(?:global_step|step|val)_(\d+)(?:\.jsonl)?")


def set_earlier_run_aside(
    dir: Path, rollouts: Path, resumed: SavedCheckpoint | None
) -> Path | None:
    """Move what the new run does not continue to `<dir>/previous-<n>`; returns that, or None.

    A run that starts anew, or from a checkpoint of another folder, continues nothing in `dir`. One
    resumed from a checkpoint of `dir` continues all but later checkpoints, if there are any, with
    what came of them. rollouts: the folder of the rollouts, `<dir>/rollouts` or another one.
    """
    if resumed is not None and resumed.path.resolve().parent == dir.resolve():
        return _set_later_steps_aside(dir, rollouts, resumed.step)
    checkpoints = _later(dir, "global_step_*", -1)
    logged = [dir / name for name in (*_RESULTS, *_LOGS) if (dir / name).exists()]
    if rollouts.resolve() != (dir / "rollouts").resolve() and rollouts.is_dir():
        own = [*_later(rollouts, "step_*.jsonl", -1), *_later(rollouts, "val_*.jsonl", -1)]
        if own:
            set_aside(own, rollouts)
    if not checkpoints and not any(map(_has_content, logged)):
        return None
    return set_aside([*checkpoints, *logged], dir)  # checkpoints first: no later run finds them


def _set_later_steps_aside(dir: Path, rollouts: Path, step: int) -> Path | None:
    checkpoints = _later(dir, "global_step_*", step)
    if not checkpoints:
        return None
    results = [dir / name for name in _RESULTS if (dir / name).exists()]
    previous = set_aside([*checkpoints, *results], dir)
    for name in ("metrics.jsonl", "config.yaml"):  # the new run goes on with its own copy
        if (dir / name).is_file():
            shutil.copy2(dir / name, previous / name)
    written = [*_later(rollouts, "step_*.jsonl", step), *_later(rollouts, "val_*.jsonl", step)]
    if written:
        (previous / "rollouts").mkdir()
        for file in written:
            shutil.move(file, previous / "rollouts" / file.name)
    return previous


def _later(dir: Path, pattern: str, step: int) -> list[Path]:
    return sorted(path for path in dir.glob(pattern) if step < _number(path))


def _number(path: Path) -> int:
    match = _NUMBERED.fullmatch(path.name)
    return int(match[1]) if match else -1


def _has_content(path: Path) -> bool:
    """Whether a run got far enough to leave it: every one writes its config at once."""
    if path.name == "config.yaml":
        return False
    return any(_files(path)) if path.is_dir() else path.stat().st_size > 0


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
