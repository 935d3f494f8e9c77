"""The rendezvous of torch's elastic launcher for ranks of one machine: a store that we bind.

torch's own rendezvous of one machine listens on all interfaces.
"""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

__all__ = ["BACKEND", "listening_store", "register"]

BACKEND = "hybridengine"  # a `rdzv_backend` whose endpoint is the address to bind


def register() -> None:
    """Let torch's launcher find the rendezvous."""
    rendezvous_handler_registry.register(BACKEND, _OneMachine)


def listening_store(address: str, port: int = 0) -> dist.TCPStore:
    """Return a new store of this process, which listens on `address` alone.

    address: "" for all of this machine.
    port: 0 for a free one.
    Raises OSError if the address is not one of this machine, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, backlog=1024)
    port = listening.getsockname()[1]
    options: dict[str, Any] = {"master_listen_fd": listening.detach(), "use_libuv": True}
    host = address or "127.0.0.1"
    return dist.TCPStore(host, port, None, is_master=True, wait_for_workers=False, **options)


class _OneMachine(RendezvousHandler):
    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store = listening_store(parameters.endpoint)
        self._address = RendezvousStoreInfo("127.0.0.1", self._store.port)

    def next_rendezvous(self) -> RendezvousInfo:
        store = dist.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, self._address)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
