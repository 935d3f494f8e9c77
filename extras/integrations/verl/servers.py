"""verl's vLLM servers, which are Ray actors, as engines that trainers send their weights to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch.distributed as dist

from hybridengine.integrations._servers import connect_servers
from hybridengine.integrations.verl.weights import ShardedWeights
from hybridengine.sync.resharder import SyncReport


class ServerSender:
    """Sends the weights of verl's training engine to vLLM servers; every trainer rank has one.

    servers: names of their Ray actors, the first of each replica.
    master_address: the address at which the servers' workers reach trainer rank 0.
    """

    def __init__(self, servers: Sequence[str], master_address: str) -> None:
        self.servers = list(servers)
        self._master_address = master_address
        self._trainer: Any = None
        self._global_steps: int | None = None

    def send(self, weights: ShardedWeights, global_steps: int | None) -> SyncReport:
        """Write the current weights into all servers. Collective over the trainer ranks.

        global_steps: verl's number of the step, which each server gets after the weights.

        Raises LayoutError where model and engines do not fit together, ReshardError if a server
        does not have the weights now, RankFailedError if a trainer is lost; on every rank.
        """
        self._global_steps = global_steps
        with weights.module() as module:
            if self._trainer is None:
                self._trainer = self._connect(module)
            self._trainer.send_weights()
        report: SyncReport = self._trainer.report
        return report

    def close(self) -> None:
        """End the connections; the weights of the servers stay as they are."""
        if self._trainer is not None:
            self._trainer.shutdown()
        self._trainer = None

    def _connect(self, module: Any) -> Any:
        names = self.servers if dist.get_rank() == 0 else []  # rank 0 makes all calls
        clients = [_Client(ray.get_actor(name), lambda: self._global_steps) for name in names]
        return connect_servers(module, clients, self._master_address)


class _Client:
    """The control plane of one server, as vLLM's `VLLMWeightSyncClient`. Calls return when done."""

    def __init__(self, server: Any, global_steps: Callable[[], int | None]) -> None:
        self._server, self._global_steps = server, global_steps

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._transfer("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._transfer("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._transfer("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._transfer("finish_weight_update", weight_version)
        if weight_version is None:  # the update failed
            return
        ray.get(self._server.clear_kv_cache.remote())
        if (step := self._global_steps()) is not None:
            ray.get(self._server.set_global_steps.remote(step))

    def _transfer(self, name: str, *arguments: Any) -> None:
        ray.get(self._server.transfer_weights.remote(name, *arguments))
