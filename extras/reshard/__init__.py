"""The public names of the weight sync: in one process, and between worlds."""

from hybridengine.remote.sync.coordinator import EngineStatus
from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.sync.loader import record_checkpoint, record_layout
from hybridengine.sync.planner import ReshardPlan, build_plan
from hybridengine.sync.resharder import Resharder, SyncReport
from hybridengine.sync.weight_target import PlanOutdatedError, RankFailedError, ReshardError

__all__ = [
    "EngineStatus",
    "PlanOutdatedError",
    "RankFailedError",
    "ReshardError",
    "ReshardPlan",
    "Resharder",
    "SyncReport",
    "WeightReceiver",
    "WeightSender",
    "build_plan",
    "record_checkpoint",
    "record_layout",
]
