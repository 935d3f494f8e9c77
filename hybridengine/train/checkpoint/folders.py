"""The folder of a run: checkpoints `<root>/global_step_<N>`, and the output of earlier runs.

A checkpoint is written under a hidden name and renamed at the end. Its `complete.json` lists every
file with its size and checksum, so a folder that is truncated or damaged is not taken as complete.

Output that a new run does not continue is archived, so that it does not mix with the new one.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch.distributed.checkpoint.stateful import Stateful

from hybridengine.run import storage
from hybridengine.run.config import JobConfig, config_to_yaml
from hybridengine.run.errors import CheckpointError
from hybridengine.train.checkpoint.tensors import TENSORS, MetadataReader

STATE = "state.json"  # counters, schedules, position in the data
CONFIG = "config.yaml"  # the resolved configuration of the run that wrote the checkpoint

# Keys that do not affect training.
_IGNORED_KEYS = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.default_local_dir")

_RESULTS = ("final", "final_adapter", "summary.json", "curves.png")
_SETTINGS = ("config.yaml", "choices.json")  # written before a run trains
_LOGS = ("metrics.jsonl", *_SETTINGS, "rollouts", "tensorboard")
_TEMPORARY = re.compile(  # of `storage.atomic_file`
    r"\.(?:choices|config|curves|metrics|summary|step_\d+|val_\d+)\.\d+\.(?:json|jsonl|png|yaml)"
)
_NUMBERED = re.compile(r"(?:global_step|step|val)_(\d+)(?:\.jsonl)?")


@dataclass(frozen=True)
class SavedCheckpoint:
    step: int
    path: Path
    score: float | None  # of the validation at that step, larger is better; None: no validation
    files: Mapping[str, list[int]]  # [bytes, CRC-32] by name

    def verify(self, names: list[str] | None = None) -> None:
        """Raise CheckpointError if the checksum of a file, or of one of `names`, differs."""
        records = {n: self.files[n] for n in (self.files if names is None else names)}
        if damage := storage.find_damage(self.path, records, checksums=True):
            raise CheckpointError(f"checkpoint {self.path}: {damage}")


def partial_folder(root: Path, step: int) -> Path:
    """Return the folder that the checkpoint of `step` is written to before it is complete."""
    return root / f".global_step_{step}.partial"


def open_checkpoint(path: str | Path) -> SavedCheckpoint:
    """Open the checkpoint in the folder `path`, without verifying checksums.

    Raises:
        CheckpointError: there is none, or a file is missing or truncated.
    """
    path = Path(path)
    try:
        manifest = storage.read_manifest(path)
    except storage.StorageError as error:
        raise CheckpointError(f"checkpoint {path} {error}; choose another one") from None
    step, score = manifest.get("step"), manifest.get("score")
    if not isinstance(step, int) or not isinstance(score, float | int | None):
        raise CheckpointError(f"{path} is not a checkpoint: complete.json has no step")
    if _step_of(path) not in (0, step):  # 0: a folder of another name
        raise CheckpointError(
            f"checkpoint {path} is of step {step}, as complete.json records; give the folder its "
            f"name global_step_{step}, or restore it"
        )
    if damage := storage.find_damage(path, manifest["files"], checksums=False):
        raise CheckpointError(f"checkpoint {path}: {damage}")
    return SavedCheckpoint(step, path, score, manifest["files"])


def list_checkpoints(root: str | Path) -> tuple[list[SavedCheckpoint], dict[Path, str]]:
    """Return the complete checkpoints under `root` by step, and the error of each other one."""
    found, unusable = [], {}
    for path in sorted(Path(root).glob("global_step_*")):
        try:
            found.append(open_checkpoint(path))
        except CheckpointError as error:
            unusable[path] = str(error)
    return sorted(found, key=lambda checkpoint: checkpoint.step), unusable


def find_checkpoints(root: str | Path) -> list[SavedCheckpoint]:
    """Return the complete checkpoints under `root`, by step."""
    return list_checkpoints(root)[0]


def publish(
    root: Path, step: int, score: float | None, records: Mapping[str, list[int]] | None = None
) -> None:
    """Complete the partial checkpoint of `step`, all files of which are written, and rename it.

    score: a score that is not finite counts as None.
    records: see `storage.write_manifest`.
    """
    written = partial_folder(root, step)
    score = score if score is not None and math.isfinite(score) else None
    storage.write_manifest(written, records, step=step, score=score)
    storage.replace_folder(written, root / f"global_step_{step}")


def prune(root: Path, keep: int | None) -> None:
    """Remove all checkpoints but the newest `keep` (None: all) and the one with the best score."""
    if keep is None:
        return
    checkpoints = find_checkpoints(root)
    scored = [c for c in checkpoints if c.score is not None]
    best = max(scored, key=lambda c: (c.score, c.step), default=None)
    for checkpoint in checkpoints[:-keep]:
        if checkpoint is not best:
            storage.remove_folder(checkpoint.path)


@dataclass(frozen=True)
class ResumePlan:
    """Checkpoints to resume from.

    candidates: newest first; a run resumes from the first whose checksums are correct. Empty: it
      starts anew.
    skipped: why newer checkpoints cannot be used.
    """

    candidates: Sequence[SavedCheckpoint] = ()
    skipped: Sequence[str] = ()

    @property
    def step(self) -> int:
        return self.candidates[0].step if self.candidates else 0

    def __str__(self) -> str:
        if not self.candidates:
            return "starts anew"
        return "; ".join(
            [f"resumes after step {self.step}, {self.candidates[0].path}", *self.skipped]
        )


def resume_plan(root: str | Path, mode: str, path: str | Path | None = None) -> ResumePlan:
    """Resolve `trainer.resume_mode`.

    auto: the newest checkpoint of `root`, or start anew if there is none. path: the checkpoint in
    `path`. disable: start anew.

    Raises:
        CheckpointError: `path` is not a checkpoint, or auto finds only damaged ones.
    """
    if mode == "disable":
        return ResumePlan()
    if mode != "auto":
        return ResumePlan([open_checkpoint(path or root)])
    usable, unusable = list_checkpoints(root)
    if not usable and unusable:
        raise _no_usable_checkpoint([unusable[folder] for folder in sorted(unusable, key=_step_of)])
    newest = usable[-1].step if usable else 0
    skipped = [why for folder, why in unusable.items() if _step_of(folder) > newest]
    return ResumePlan(usable[::-1], skipped)


def without_damaged(plan: ResumePlan, verify: Callable[[SavedCheckpoint], None]) -> ResumePlan:
    """Drop the newest candidates for which `verify` raises CheckpointError.

    Raises:
        CheckpointError: no candidate is left.
    """
    if not plan.candidates:
        return plan
    skipped = list(plan.skipped)
    for k, checkpoint in enumerate(plan.candidates):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return ResumePlan(plan.candidates[k:], skipped)
    raise _no_usable_checkpoint(skipped)


def _no_usable_checkpoint(reasons: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{reasons[-1]}; there is no other checkpoint to resume from: restore it, or start anew "
        "with trainer.resume_mode=disable"
    )


def _step_of(folder: Path) -> int:
    number = folder.name.removeprefix("global_step_")
    return int(number) if number.isdecimal() else 0


def read_state(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """Read state.json of a checkpoint; raise CheckpointError if that fails."""
    try:
        state = json.loads((checkpoint.path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.path}: {STATE}: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {checkpoint.path}: {STATE} is not an object")
    return state


def checkpoint_to_resume(config: JobConfig) -> SavedCheckpoint | None:
    """Return the checkpoint from which the run of `config` would resume; None: it starts anew."""
    trainer = config.trainer
    plan = resume_plan(trainer.default_local_dir, trainer.resume_mode, trainer.resume_from_path)
    plan = without_damaged(plan, _verify_small_files)
    return plan.candidates[0] if plan.candidates else None


def check_resume(
    checkpoint: SavedCheckpoint,
    config: JobConfig,
    loader: Stateful,
    parameters: Mapping[str, tuple[int, ...]],
    states: Sequence[str],
) -> None:
    """Check that a checkpoint fits the run of `config`.

    loader: the loader of the training data, which is moved to the checkpoint's position.
    parameters: the shape of every parameter of the trained model, by name.
    states: names of the states that the run resumes, besides the loader's.

    Raises:
        CheckpointError: the checkpoint is of another model or another kind of training.
        DataError: the order of the training data differs.
    """
    state = read_state(checkpoint)
    if missing := [name for name in ("loader", *states) if name not in state]:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} has no state of {missing[0]!r}: it is of another "
            "kind of training; set another trainer.default_local_dir"
        )
    loader.load_state_dict(state["loader"])
    _check_tensors(checkpoint, config, parameters)


def _verify_small_files(checkpoint: SavedCheckpoint) -> None:
    """Verify the files that are read here; a run verifies all of them."""
    checkpoint.verify([n for n in (STATE, f"{TENSORS}/.metadata") if n in checkpoint.files])


def _check_tensors(
    checkpoint: SavedCheckpoint, config: JobConfig, parameters: Mapping[str, tuple[int, ...]]
) -> None:
    saved = MetadataReader(checkpoint.path / TENSORS).read_metadata().state_dict_metadata
    shapes = {
        name.removeprefix("actor/model/"): tuple(tensor.size)
        for name, tensor in saved.items()
        if name.startswith("actor/model/") and hasattr(tensor, "size")
    }
    adapters = {shape[0] for name, shape in shapes.items() if "lora_A" in name}
    rank, target_experts = config.model.lora_rank, config.model.target_parameters
    counts = {shape[0] for shape in parameters.values() if len(shape) == 3 and target_experts}
    if bool(adapters) != bool(rank) or adapters - {rank * count for count in {1, *counts}}:
        trained = f"adapters of rank {min(adapters)}" if adapters else "all weights"
        raise CheckpointError(
            f"checkpoint {checkpoint.path} does not fit model.lora_rank={rank}: it was trained "
            f"with {trained}"
        )
    if rank:
        return
    for name, shape in parameters.items():
        if shapes.get(name) != tuple(shape):
            was = f"{name} as {list(shapes[name])}" if name in shapes else f"no {name}"
            raise CheckpointError(
                f"checkpoint {checkpoint.path} does not fit model.path: it contains {was}, "
                f"expected {list(shape)}"
            )


def changed_settings(checkpoint: SavedCheckpoint, config: JobConfig) -> list[str]:
    """List `key: before → now` for every setting that differs from the run of `checkpoint`."""
    file = checkpoint.path / CONFIG
    if not file.is_file():
        return []
    before = _flat(OmegaConf.to_container(OmegaConf.load(file)))
    now = _flat(OmegaConf.to_container(OmegaConf.create(config_to_yaml(config))))
    return [
        f"{key}: {before.get(key, 'not set')} → {now.get(key, 'not set')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in _IGNORED_KEYS
    ]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        flat |= _flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat


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
        storage.archive(earlier_rollouts, rollouts)
    if not checkpoints and not any(map(_has_content, logged)):
        return None
    return storage.archive(
        [*checkpoints, *logged], dir
    )  # checkpoints first: no run resumes from them


def _archive_later_steps(dir: Path, rollouts: Path, step: int) -> Path | None:
    checkpoints = _after(step, dir, "global_step_*")
    if not checkpoints:
        return None
    results = [dir / name for name in _RESULTS if (dir / name).exists()]
    previous = storage.archive([*checkpoints, *results], dir)
    for name in ("metrics.jsonl", *_SETTINGS):  # copied: the new run continues them
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
    """Return whether a run that trained left `path`; its settings are written before that."""
    if path.name in _SETTINGS:
        return False
    return any(p.is_file() for p in path.rglob("*")) if path.is_dir() else path.stat().st_size > 0
