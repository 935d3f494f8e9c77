"""Zero-redundancy reshard from FSDP2 shards to the engine's tensor-parallel weights."""

from hybridengine.reshard.execute.failures import PlanOutdatedError, RankLostError, ReshardError
from hybridengine.reshard.execute.resharder import Resharder, SyncReport
from hybridengine.reshard.plan.planner import ReshardPlan, build_plan
from hybridengine.reshard.record.loader import record_checkpoint, record_layout

__all__ = [
    "PlanOutdatedError",
    "RankLostError",
    "ReshardError",
    "ReshardPlan",
    "Resharder",
    "SyncReport",
    "build_plan",
    "record_checkpoint",
    "record_layout",
]
