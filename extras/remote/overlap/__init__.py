"""Generation on engine ranks while the trainer ranks train, see docs/remote.md.

queue    WorkItem       prompts of a batch that one engine generates at once
         TrainerQueue   hands out items, receives their rollouts
         EngineQueue    claims items, announces and sends their rollouts
worker   RolloutWorker  the loop of an engine rank, or of one that leaves generation to servers
source   OverlappedRollouts  what a trainer rank sees of all that
metrics  Utilisation    how long both wait, and how old the weights are
"""

from hybridengine.remote.overlap.source import OverlappedRollouts
from hybridengine.remote.overlap.worker import RolloutWorker

__all__ = ["OverlappedRollouts", "RolloutWorker"]
