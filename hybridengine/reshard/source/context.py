"""What a trainer rank reads the source with."""

from __future__ import annotations

from typing import NamedTuple

from hybridengine.reshard.plan.planner import ReshardPlan
from hybridengine.reshard.source.trained import TrainedTensors
from hybridengine.runtime.failures import CollectiveGuard


class RankContext(NamedTuple):
    """rank: in the plan. trained: this rank's view of the trained model. guard: of the collectives
    among the trained model's ranks."""

    plan: ReshardPlan
    rank: int
    trained: TrainedTensors
    guard: CollectiveGuard
