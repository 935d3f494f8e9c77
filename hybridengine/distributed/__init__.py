"""Ranks: their process group, their phases, and what happens when one is lost."""

from hybridengine.distributed.peers import EXIT_PEER_LOST, PeerLost, PeerWatch
from hybridengine.distributed.session import Session, run_rank

__all__ = ["EXIT_PEER_LOST", "PeerLost", "PeerWatch", "Session", "run_rank"]
