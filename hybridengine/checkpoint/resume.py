"""What a run resumes from, and whether it can; known before a rank starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf

from hybridengine.checkpoint.folders import (
    CheckpointError,
    SavedCheckpoint,
    list_checkpoints,
    open_checkpoint,
)
from hybridengine.config import GRPOConfig, JobConfig, config_to_yaml
from hybridengine.trainer.algorithms import NEEDS

__all__ = [
    "CONFIG",
    "STATE",
    "TENSORS",
    "Resumable",
    "ResumePlan",
    "changed_settings",
    "check_resume",
    "none_left",
    "read_state",
    "resume_plan",
]

TENSORS = "tensors"  # the folder of a checkpoint that DCP writes
STATE = "state.json"  # what is small: counters, schedules
CONFIG = "config.yaml"  # the resolved configuration of the run that wrote the checkpoint

_NO_SETTING = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.default_local_dir")


class Resumable(Protocol):
    """Something small with a state that JSON can hold: a loader, a KL controller."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class ResumePlan:
    """candidates: newest first; the first one whose checksums are right is resumed from, and none
    means that the run starts anew. skipped: why newer checkpoints cannot be used."""

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
    """What `resume_mode` means: auto takes the newest checkpoint of `root`, or starts anew where
    there is none; path takes the one in `path`; disable starts anew.

    Raises CheckpointError for a bad `path`, and where auto finds only damaged checkpoints.
    """
    if mode == "disable":
        return ResumePlan()
    if mode != "auto":
        return ResumePlan([open_checkpoint(path or root)])
    found, unusable = list_checkpoints(root)
    if not found and unusable:
        raise none_left([unusable[folder] for folder in sorted(unusable, key=_step_of)])
    newest = found[-1].step if found else 0
    skipped = [why for folder, why in unusable.items() if _step_of(folder) > newest]
    return ResumePlan(found[::-1], skipped)


def _readable(plan: ResumePlan) -> ResumePlan:
    """`plan` without the newest checkpoints whose small files are damaged; a run verifies all."""
    skipped = list(plan.skipped)
    for k, checkpoint in enumerate(plan.candidates):
        try:
            small = {STATE, f"{TENSORS}/.metadata"}
            checkpoint.verify(sorted(small & checkpoint.files.keys()))
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return ResumePlan(plan.candidates[k:], skipped)
    if plan.candidates:
        raise none_left(skipped)
    return plan


def none_left(reasons: Sequence[str]) -> CheckpointError:
    """The error of a run all of whose checkpoints are damaged; reasons: one of each."""
    return CheckpointError(
        f"{reasons[-1]}; there is no other checkpoint to resume from: restore it, or start anew "
        "with trainer.resume_mode=disable"
    )


def _step_of(folder: Path) -> int:
    number = folder.name.removeprefix("global_step_")
    return int(number) if number.isdigit() else 0


def read_state(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """state.json of a checkpoint; CheckpointError if it cannot be read."""
    try:
        state = json.loads((checkpoint.path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.path}: {STATE}: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {checkpoint.path}: {STATE} is not an object")
    return state


def check_resume(
    config: JobConfig, loader: Resumable, parameters: Mapping[str, tuple[int, ...]]
) -> ResumePlan:
    """What the run of `config` would resume from; before a rank starts.

    loader: over the training data, left at the position of the checkpoint. parameters: the shape
    of every parameter of the trained model, by name.

    Raises:
        CheckpointError: the checkpoint holds another model or another kind of training.
        DataError: the order of the training data was another one.
    """
    trainer = config.trainer
    plan = _readable(
        resume_plan(trainer.default_local_dir, trainer.resume_mode, trainer.resume_from_path)
    )
    if not plan.candidates:
        return plan
    checkpoint = plan.candidates[0]
    state = read_state(checkpoint)
    for name in _counters(config):
        if name not in state:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} holds no state of {name!r}: it is one of another "
                "kind of training; set another trainer.default_local_dir"
            )
    loader.load_state_dict(state["loader"])
    _check_tensors(checkpoint, config, parameters)
    return plan


def _counters(config: JobConfig) -> list[str]:
    names = ["loader", "actor.optimizer"]
    if isinstance(config, GRPOConfig):
        names += ["kl"] if config.algorithm.use_kl_in_reward else []
        values = "values" in NEEDS.get(config.algorithm.adv_estimator, ())
        names += ["critic.optimizer"] if values else []
    return names


def _check_tensors(
    checkpoint: SavedCheckpoint, config: JobConfig, parameters: Mapping[str, tuple[int, ...]]
) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    try:
        saved = FileSystemReader(checkpoint.path / TENSORS).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"checkpoint {checkpoint.path}: its metadata cannot be read: {error}"
        ) from None
    shapes = {
        name.removeprefix("actor/model/"): tuple(tensor.size)
        for name, tensor in saved.items()
        if name.startswith("actor/model/") and hasattr(tensor, "size")
    }
    adapters = {shape[0] for name, shape in shapes.items() if "lora_A" in name}
    rank = config.model.lora_rank
    if adapters != ({rank} if rank else set()):
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
                f"checkpoint {checkpoint.path} does not fit model.path: it holds {was}, "
                f"expected {list(shape)}"
            )


def changed_settings(checkpoint: SavedCheckpoint, config: JobConfig) -> list[str]:
    """`key: before → now` of every key that the run of `checkpoint` had set otherwise."""
    file = checkpoint.path / CONFIG
    if not file.is_file():
        return []
    before = _flat(OmegaConf.to_container(OmegaConf.load(file)))
    now = _flat(OmegaConf.to_container(OmegaConf.create(config_to_yaml(config))))
    return [
        f"{key}: {_shown(before, key)} → {_shown(now, key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in _NO_SETTING
    ]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return str(settings[key]) if key in settings else "not there"
