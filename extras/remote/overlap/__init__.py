"""Generation on engine ranks while the trainer ranks train, see docs/remote.md.

queue    WorkItem       prompts of a batch that one engine generates at once
         TrainerQueue   hands out items, receives their rollouts
         EngineQueue    claims items, announces and sends their rollouts
worker   RolloutWorker  the loop of an engine rank
servers  connect_servers  vLLM servers in place of an engine on that rank
source   OverlappedRollouts  what a trainer rank sees of all that
"""

from hybridengine.remote.overlap.source import OverlappedRollouts
from hybridengine.remote.overlap.worker import RolloutWorker

__all__ = ["OverlappedRollouts", "RolloutWorker"]
