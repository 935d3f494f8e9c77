"""Checkpoints: saved beside the training, whole or not there, resumed exactly."""

from hybridengine.checkpoint.checkpointer import Checkpointer, Resumable, chosen_checkpoint
from hybridengine.checkpoint.folders import (
    CheckpointError,
    SavedCheckpoint,
    find_checkpoints,
    open_checkpoint,
)

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Resumable",
    "SavedCheckpoint",
    "chosen_checkpoint",
    "find_checkpoints",
    "open_checkpoint",
]
