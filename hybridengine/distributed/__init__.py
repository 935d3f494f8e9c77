"""Ranks: their process group, their phases, and what happens when one is lost."""

from hybridengine.distributed.peers import EXIT_PEER_LOST, PeerWatch
from hybridengine.distributed.run_lock import RunLock
from hybridengine.distributed.session import Session, run_rank
from hybridengine.distributed.stop import EXIT_STOPPED

__all__ = [
    "EXIT_PEER_LOST",
    "EXIT_STOPPED",
    "PeerWatch",
    "RunLock",
    "Session",
    "run_rank",
]
