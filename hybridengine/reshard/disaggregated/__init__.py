"""Weight sync from trainers to engines in other processes, or on other machines.

records      what both sides tell each other through a store
coordinator  trainer rank 0's view of the engines: who takes part, who has committed
engine_rank  an engine rank's view of the syncs: what it tells, what it waits for
planning     the plan, made on both sides
link         process groups between trainers and engines, and how bytes are divided
transfer     the buckets over the links: pack and send; receive, gather and unpack
verify       checksums of all slices
sender       WeightSender, on every trainer rank
receiver     WeightReceiver, on every engine rank
"""

from hybridengine.reshard.disaggregated.coordinator import EngineStatus
from hybridengine.reshard.disaggregated.receiver import WeightReceiver
from hybridengine.reshard.disaggregated.sender import WeightSender

__all__ = ["EngineStatus", "WeightReceiver", "WeightSender"]
