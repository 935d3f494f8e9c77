"""vLLM servers, on this or other machines, as one rollout engine.

client    VllmServer    one server over HTTP
pool      ServerPool    which servers have the newest weights, and which are lost
engine    ServerEngine  generates on all of them
receiver  ServerReceiver  lets them take part in weight syncs
"""

from hybridengine.remote.servers.client import (
    ServerLostError,
    ServerWeights,
    TrainersStore,
    VllmServer,
)
from hybridengine.remote.servers.engine import ServerEngine
from hybridengine.remote.servers.pool import NoServerError, ServerPool
from hybridengine.remote.servers.receiver import ServerReceiver

__all__ = [
    "NoServerError",
    "ServerEngine",
    "ServerLostError",
    "ServerPool",
    "ServerReceiver",
    "ServerWeights",
    "TrainersStore",
    "VllmServer",
]
