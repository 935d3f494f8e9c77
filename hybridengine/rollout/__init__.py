"""Rollout engines: token ids in, token ids and log-probs out."""

from hybridengine.rollout.engine import (
    Completion,
    InFlightUpdate,
    Request,
    RequestStream,
    RolloutEngine,
    SamplingSpec,
    derive_seed,
)
from hybridengine.sharding.weight_target import StaleWeightsError

__all__ = [
    "Completion",
    "InFlightUpdate",
    "Request",
    "RequestStream",
    "RolloutEngine",
    "SamplingSpec",
    "StaleWeightsError",
    "derive_seed",
]
