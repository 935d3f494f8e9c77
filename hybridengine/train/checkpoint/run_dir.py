"""Archive the output of an earlier run, so that a new run in its folder does not mix with it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hybridengine.run.storage import archive
from hybridengine.train.checkpoint import SavedCheckpoint

_RESULTS = ("final", "final_adapter", "summary.json", "curves.png")
_LOGS = ("metrics.jsonl", "config.yaml", "rollouts", "tensorboard")
_TEMPORARY = re.compile(  # of `storage.atomic_file`
    r"\.(?:config|curves|metrics|summary|step_\d+|val_\d+)\.\d+\.(?:json|jsonl|png|yaml)"
)
_NUMBERED = re.compile(r"(?:global_step|step|val)_(\d+)(?:\.jsonl)?")


def archive_earlier_run(dir: Path, rollouts: Path, resumed: SavedCheckpoint | None) -> Path | None:
    """Move output that the new run does not continue to `<dir>/previous-<n>`; return it or None.

    A run that starts anew, or from a checkpoint of another folder, continues nothing in `dir`. A
    run resumed from a checkpoint of `dir` continues everything up to that step; later checkpoints,
    if there are any, are archived with the output of the later steps.

    rollouts: folder of the rollouts, `<dir>/rollouts` or another one. Temporary files that a killed
    run has left are removed.
    """
    for file in [*dir.glob(".*"), *rollouts.glob(".*")]:
        if _TEMPORARY.fullmatch(file.name):
            file.unlink()
    if resumed is not None and resumed.path.resolve().parent == dir.resolve():
        return _archive_later_steps(dir, rollouts, resumed.step)
    checkpoints = _after(-1, dir, "global_step_*")
    logged = [dir / name for name in (*_RESULTS, *_LOGS) if (dir / name).exists()]
    earlier_rollouts = _after(-1, rollouts, "step_*.jsonl", "val_*.jsonl")
    if earlier_rollouts and rollouts.resolve() != (dir / "rollouts").resolve():
        archive(earlier_rollouts, rollouts)
    if not checkpoints and not any(map(_has_content, logged)):
        return None
    return archive([*checkpoints, *logged], dir)  # checkpoints first: no run resumes from them


def _archive_later_steps(dir: Path, rollouts: Path, step: int) -> Path | None:
    checkpoints = _after(step, dir, "global_step_*")
    if not checkpoints:
        return None
    results = [dir / name for name in _RESULTS if (dir / name).exists()]
    previous = archive([*checkpoints, *results], dir)
    for name in ("metrics.jsonl", "config.yaml"):  # copied: the new run continues them
        if (dir / name).is_file():
            shutil.copy2(dir / name, previous / name)
    if later_rollouts := _after(step, rollouts, "step_*.jsonl", "val_*.jsonl"):
        (previous / "rollouts").mkdir()
        for file in later_rollouts:
            shutil.move(file, previous / "rollouts" / file.name)
    return previous


def _after(step: int, dir: Path, *patterns: str) -> list[Path]:
    """List the paths that match one of `patterns` and have a number above `step` in their name."""
    paths = (path for pattern in patterns for path in sorted(dir.glob(pattern)))
    return [p for p in paths if (m := _NUMBERED.fullmatch(p.name)) and int(m[1]) > step]


def _has_content(path: Path) -> bool:
    """Return whether a run that trained left `path`; config.yaml is written before that."""
    if path.name == "config.yaml":
        return False
    return any(p.is_file() for p in path.rglob("*")) if path.is_dir() else path.stat().st_size > 0
