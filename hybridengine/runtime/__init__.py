"""Ranks: their process group, their phases, and what happens when one is lost."""

from hybridengine.runtime.peers import EXIT_PEER_LOST, PeerWatch
from hybridengine.runtime.run_lock import RunLock
from hybridengine.runtime.session import Session, run_rank
from hybridengine.runtime.stop import EXIT_STOPPED

__all__ = [
    "EXIT_PEER_LOST",
    "EXIT_STOPPED",
    "PeerWatch",
    "RunLock",
    "Session",
    "run_rank",
]
