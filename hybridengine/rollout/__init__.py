"""Rollout engines: token ids in, token ids and log-probs out."""

from hybridengine.rollout.engine import (
    InFlightUpdate,
    Request,
    RequestStream,
    RolloutEngine,
    SamplingSpec,
    derive_seed,
)
from hybridengine.rollout.response import Response
from hybridengine.sharding.weight_target import StaleWeightsError

__all__ = [
    "InFlightUpdate",
    "Request",
    "RequestStream",
    "Response",
    "RolloutEngine",
    "SamplingSpec",
    "StaleWeightsError",
    "derive_seed",
]
