"""Weight sync from FSDP2 shards to the tensor-parallel weights of engines, without redundancy.

    record     EngineLayout   strided copies: trained parameter → engine tensor, as the engine loads
    plan       ReshardPlan    who sends which slice to whom, in which bucket; the same on every rank
               Bucket         parts of many parameters (Chunk) that travel at once
    trainers   Trainers       what the training ranks read, and agree on
    source     TrainedTensors the trainer's shards, adapters merged; ChangeFinder: what changed
    payload    Dense, Delta   all elements of a bucket, cast or quantized; or those that changed
    transport  Transport      moves messages: pull, all-to-all, or over a Link between worlds
    target     WeightTarget   an engine's tensors and what they are: version, partial, discarded
    move       Mover          the straight line: source → payload → transport → target
    commit     Coordinator    agreement of trainers with engines in other worlds (EngineRank)
    faces      Resharder      engine in the trainers' processes
               WeightSender, WeightReceiver   engines in other processes, on any device

`record` and `plan` run once, the rest at every sync. The advisor plans without running anything.
"""

from hybridengine.reshard.commit.coordinator import EngineStatus
from hybridengine.reshard.errors import PlanOutdatedError, RankFailedError, ReshardError
from hybridengine.reshard.plan.planner import ReshardPlan, build_plan
from hybridengine.reshard.receiver import WeightReceiver
from hybridengine.reshard.record.loader import record_checkpoint, record_layout
from hybridengine.reshard.report import SyncReport
from hybridengine.reshard.resharder import Resharder
from hybridengine.reshard.sender import WeightSender

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
