"""Importance weights and rejection for the mismatch of rollout engine and training policy."""

from .op import RolloutCorrection, rollout_correction
from .reference import REJECTION_CRITERIA

__all__ = ["REJECTION_CRITERIA", "RolloutCorrection", "rollout_correction"]
