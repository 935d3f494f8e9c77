"""Checkpoints: saved beside the training, complete or absent, resumed exactly."""

from hybridengine.checkpoint.checkpointer import Checkpointer
from hybridengine.checkpoint.folders import (
    CheckpointError,
    SavedCheckpoint,
    find_checkpoints,
    open_checkpoint,
)
from hybridengine.checkpoint.resume import (
    Resumable,
    ResumePlan,
    changed_settings,
    check_resume,
    resume_plan,
)

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Resumable",
    "ResumePlan",
    "SavedCheckpoint",
    "changed_settings",
    "check_resume",
    "find_checkpoints",
    "open_checkpoint",
    "resume_plan",
]
