"""Rollout engines: token ids in, token ids and log-probs out."""

from hybridengine.rollout.engine import (
    Completion,
    RolloutEngine,
    SamplingSpec,
    StaleWeightsError,
    tp_groups,
)

__all__ = ["Completion", "RolloutEngine", "SamplingSpec", "StaleWeightsError", "tp_groups"]
