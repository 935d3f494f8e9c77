"""Save, resume and export: checkpoints, Hugging Face folders, adapters, archived runs."""

from hybridengine.checkpoint.checkpointer import Checkpointer
from hybridengine.checkpoint.folders import (
    SavedCheckpoint,
    changed_settings,
    check_resume,
    find_checkpoints,
    resume_plan,
)
from hybridengine.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "SavedCheckpoint",
    "changed_settings",
    "check_resume",
    "find_checkpoints",
    "resume_plan",
]
