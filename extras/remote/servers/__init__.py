"""vLLM servers, on this or other machines, as one rollout engine.

client    VllmServer    one server over HTTP
pool      ServerPool    which servers have the newest weights, and which are lost
          ServerReceiver  lets them take part in weight syncs
engine    ServerEngine  generates on all of them
"""

from hybridengine.remote.servers.client import (
    ServerLostError,
    ServerWeights,
    TrainersStore,
    VllmServer,
)
from hybridengine.remote.servers.engine import ServerEngine
from hybridengine.remote.servers.pool import NoServerError, ServerPool, ServerReceiver

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
