"""What a rank executes a plan with."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hybridengine.reshard.execute.trained import TrainedTensors
from hybridengine.reshard.plan.planner import ReshardPlan
from hybridengine.runtime.device import DeviceProgress
from hybridengine.runtime.failures import CollectiveGuard


class RankContext(NamedTuple):
    """What all transports of one rank have in common.

    rank: in the plan. trained: this rank's view of the trained model. device: of its shards and of
    the engine. guard: of the collectives among the trained model's ranks. progress: on a GPU
    everything is only enqueued, and the caller waits for it.
    """

    plan: ReshardPlan
    rank: int
    trained: TrainedTensors
    device: torch.device
    guard: CollectiveGuard
    progress: DeviceProgress
