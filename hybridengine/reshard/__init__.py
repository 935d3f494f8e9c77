"""Zero-redundancy reshard from FSDP2 shards to the engine's tensor-parallel weights."""

from hybridengine.reshard.api import connect, reshard
from hybridengine.reshard.layout import (
    Checkpoint,
    Copy,
    EngineLayout,
    LayoutError,
    TensorSpec,
    identity_layout,
    record_checkpoint,
    record_layout,
)
from hybridengine.reshard.plan import ReshardPlan, build_plan
from hybridengine.reshard.resharder import (
    PlanOutdatedError,
    RankLostError,
    Resharder,
    ReshardError,
    SyncReport,
)
from hybridengine.reshard.shards import ShardSpec

__all__ = [
    "Checkpoint",
    "Copy",
    "EngineLayout",
    "LayoutError",
    "PlanOutdatedError",
    "RankLostError",
    "ReshardError",
    "ReshardPlan",
    "Resharder",
    "ShardSpec",
    "SyncReport",
    "TensorSpec",
    "build_plan",
    "connect",
    "identity_layout",
    "record_checkpoint",
    "record_layout",
    "reshard",
]
