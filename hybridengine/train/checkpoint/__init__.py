"""Save, resume and export: checkpoints, Hugging Face folders, adapters, archived runs."""

from hybridengine.run.errors import CheckpointError
from hybridengine.train.checkpoint.checkpointer import Checkpointer
from hybridengine.train.checkpoint.folders import (
    SavedCheckpoint,
    changed_settings,
    check_resume,
    checkpoint_to_resume,
    find_checkpoints,
    resume_plan,
)

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "SavedCheckpoint",
    "changed_settings",
    "check_resume",
    "checkpoint_to_resume",
    "find_checkpoints",
    "resume_plan",
]
