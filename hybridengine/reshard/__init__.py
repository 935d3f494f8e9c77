"""Weight sync from FSDP2 shards to the tensor-parallel weights of an engine, without redundancy.

    record   Copy          strided copy: trained parameter → engine tensor, as the engine loads it
             EngineLayout  all copies of one engine rank
    plan     ShardSpec     which ranks hold which box of a parameter
             Block         a Copy in the coordinates of the parameter, so that it can be cut
             SourceClass   parameters with equal ShardSpec and Blocks (equal layers): planned once
             Chunk         what of a parameter travels together, small against a bucket
             SliceCopy     one strided slice of a Chunk: shard, sender, receiver, writes
             Bucket        Chunks of many parameters that travel at once
             ReshardPlan   all Buckets; the same on every rank
    execute  Exchange      a Bucket on one rank: tables of strided copies (pack, local, unpack)
             Resharder     sync(): every Exchange, by pull or by all-to-all, then commit
    delta    DeltaSync     the same for only those elements whose bits changed

`record` and `plan` run once, `execute` at every step. The advisor plans without running anything.
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
