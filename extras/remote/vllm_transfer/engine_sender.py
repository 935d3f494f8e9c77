"""The weights of a model to vLLM engines elsewhere, over a store that trainer rank 0 opens.

    sender = EngineSender("trainer-0")                    # every trainer rank
    sender.set_model(module_arguments(fsdp_model), num_engines=2)
    # the workers of engine i: init_weight_transfer_engine(sender.join_info(i))
    # after every step the workers: start_weight_update(), update_weights({"version": …}), while
    sender.send(version)                                  # every trainer rank

Whoever drives the engines makes the calls of their workers: vLLM's own trainer interface
(`hybridengine.remote.vllm_transfer.trainer`), or another trainer's (`hybridengine.integrations`).
The trainers need no vLLM.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hybridengine.remote.sync.coordinator import Absent
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.remote.vllm_transfer.source import SenderArguments
from hybridengine.run.all_ranks import broadcast_value, run_on_all_ranks
from hybridengine.run.messages import MessageError, check_secret
from hybridengine.run.rendezvous import listening_store
from hybridengine.sync.resharder import SyncReport
from hybridengine.sync.weight_target import PlanOutdatedError, ReshardError

__all__ = ["PREFIX", "EngineSender"]

PREFIX = "weights"  # of the keys in the store


class EngineSender:
    """Sends a model to the workers of engines in other processes. On every trainer rank.

    host, port: of the store, which trainer rank 0 opens, as the workers reach it. port 0: a free
      one.
    bucket_bytes, timeout_s: as `WeightSender`.

    Collective. Raises ReshardError, on every rank, without HYBRIDENGINE_SECRET or if the store
    cannot be opened or reached.
    """

    def __init__(
        self, host: str, *, port: int = 0, bucket_bytes: int | None = None, timeout_s: float = 300.0
    ) -> None:
        self._host, self._bucket_bytes, self._timeout_s = host, bucket_bytes, timeout_s
        self._store: dist.Store | None = self._open_store(port)
        self._model: tuple[SenderArguments, int] | None = None
        self._sender: WeightSender | None = None

    def _open_store(self, wanted: int) -> dist.Store:
        host, timeout = self._host, timedelta(seconds=self._timeout_s)
        store: dist.TCPStore | None = None

        def listen() -> None:
            nonlocal store
            check_secret("the workers of the engines verify by it what the trainers tell them")
            if dist.get_rank() == 0:
                store = listening_store(host, wanted)

        def connect() -> dist.TCPStore:
            return store or dist.TCPStore(host, self.port, is_master=False, timeout=timeout)

        what = f"at master_address={host!r}, master_port={wanted},"
        run_on_all_ranks(listen, ReshardError, f"opening a store {what}")
        self.port = broadcast_value(store.port if store else 0, int)
        return run_on_all_ranks(connect, ReshardError, f"connecting to the store {what}")

    def join_info(self, index: int) -> dict[str, Any]:
        """Return the init info of the workers of engine number `index` (`StoreInfo`)."""
        return {
            "host": self._host,
            "port": self.port,
            "prefix": PREFIX,
            "index": index,
            "timeout_s": self._timeout_s,
        }

    def set_model(self, model: SenderArguments, num_engines: int) -> None:
        """Choose what is sent, and to how many engines (of trainer rank 0). Collective.

        Raises LayoutError for a model that cannot be sent.
        """
        if self._store is None:
            raise RuntimeError("the connections to the engines were ended")
        num_engines = broadcast_value(num_engines, int)
        self._model = model, num_engines
        self._sender = WeightSender(
            store=dist.PrefixStore(PREFIX, self._store),
            num_engines=num_engines,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            **model._asdict(),
        )

    def send(self, version: int, absent: Absent | None = None) -> SyncReport:
        """Send the current weights to all engines. Collective.

        absent: as `WeightSender.sync`, whose errors it raises. Plans again where the parameters
        have changed.
        """
        assert self._sender is not None and self._model is not None
        try:
            return self._sender.sync(version, absent=absent)
        except PlanOutdatedError:  # on every rank
            self.set_model(*self._model)
            return self._sender.sync(version, absent=absent)

    def ended(self, engine: int) -> str:
        """Return which workers of an engine have ended, as `WeightSender.ended`."""
        with suppress(ReshardError, MessageError):  # of the store: the next sync raises it
            return self._sender.ended(engine) if self._sender is not None else ""
        return ""

    def close(self) -> None:
        """End the connections to the engines, whose weights stay as they are."""
        self._sender = self._store = None
