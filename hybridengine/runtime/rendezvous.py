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

__all__ = ["BACKEND", "register"]

BACKEND = "hybridengine"  # a `rdzv_backend` whose endpoint is the address to bind


def register() -> None:
    """Let torch's launcher find the rendezvous."""
    rendezvous_handler_registry.register(BACKEND, _OneMachine)


class _OneMachine(RendezvousHandler):
    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        listening = socket.create_server((parameters.endpoint, 0), backlog=1024)
        port: int = listening.getsockname()[1]
        self._address = RendezvousStoreInfo("127.0.0.1", port)
        options: dict[str, Any] = {"master_listen_fd": listening.detach(), "use_libuv": True}
        self._store = dist.TCPStore(
            "127.0.0.1", port, None, is_master=True, wait_for_workers=False, **options
        )

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
