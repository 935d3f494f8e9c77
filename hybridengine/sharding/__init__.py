"""Shards, adapters and weight layouts: the types that model, reshard and rollout share."""

from hybridengine.sharding.adapter import Adapter
from hybridengine.sharding.copies import Copy
from hybridengine.sharding.layout import CheckpointLayout, EngineLayout, LayoutError, TensorSpec
from hybridengine.sharding.shards import ShardSpec
from hybridengine.sharding.tp_groups import tp_groups
from hybridengine.sharding.weight_target import StaleWeightsError

__all__ = [
    "Adapter",
    "CheckpointLayout",
    "Copy",
    "EngineLayout",
    "LayoutError",
    "ShardSpec",
    "StaleWeightsError",
    "TensorSpec",
    "tp_groups",
]
