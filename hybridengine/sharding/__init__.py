"""What model, reshard and rollout share: shards, adapters, engine layouts, weight targets."""

from hybridengine.sharding.adapter import Adapter
from hybridengine.sharding.copies import Copy
from hybridengine.sharding.layout import (
    Checkpoint,
    EngineLayout,
    LayoutError,
    TensorSpec,
    identity_layout,
)
from hybridengine.sharding.shards import ShardSpec, local_shard
from hybridengine.sharding.tp_groups import tp_groups
from hybridengine.sharding.weight_target import StaleWeightsError, WeightTarget

__all__ = [
    "Adapter",
    "Checkpoint",
    "Copy",
    "EngineLayout",
    "LayoutError",
    "ShardSpec",
    "StaleWeightsError",
    "TensorSpec",
    "WeightTarget",
    "identity_layout",
    "local_shard",
    "tp_groups",
]
