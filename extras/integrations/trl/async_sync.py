"""The weight sync of TRL's AsyncGRPOTrainer and AsyncDistillationTrainer by slices from all ranks.

TRL's own sync interleaves collectives of all ranks (`full_tensor()`) with what only rank 0 does:
requests to the server and the broadcast to its workers. Where these stall or fail, the other ranks
wait in a collective for ever (TRL #7103, #6797). Here all ranks take every step, and an error of
one is raised on all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hybridengine.integrations.trl import server
from hybridengine.run.messages import broadcast_value

_SERVER = "_hybridengine_server"  # attribute of a trainer: its ServerSync, None if TRL's code syncs
_WAITS = 3.25  # a sync takes up to so many times the timeout of a `WeightSender`


def init_weight_transfer(self: Any, original: Callable[[Any], None]) -> None:
    """Leave the work of TRL's `WeightTransferClient.init_weight_transfer` to the first sync.

    TRL calls it on rank 0 alone, where an error would leave the other ranks waiting.
    """
    if _is_trls(self):
        self.model_update_group = SimpleNamespace(group=SimpleNamespace())  # None: sends nothing
    else:  # a user's subclass, which `sync_weight_merged` leaves alone
        original(self)


def sync_weight_merged(
    self: Any,
    t0: float,
    original: Callable[[Any, float], tuple[float, float, float]],
    original_init: Callable[[Any], None],
) -> tuple[float, float, float]:
    """Publish the weights, as the `_sync_weight_merged` of TRL's trainers. Collective.

    t0: TRL's.
    original, original_init: TRL's, for a server with the backend `nccl` and for transfers other
      than TRL's own. The second one is called here, where its errors reach all ranks.
    """
    if not hasattr(self, _SERVER):
        setattr(self, _SERVER, _connect(self, original_init))
    sync = getattr(self, _SERVER)
    if sync is None:
        return original(self, t0)
    sync.pause()  # on return all ranks are here: there is no barrier to wait for
    paused = time.time()
    sync.send(self.accelerator.unwrap_model(self.model))
    sent = time.time()
    sync.resume()
    if self.accelerator.is_main_process:
        self.model_version += 1
        if self.rollout_worker:
            self.rollout_worker.update_model_version(self.model_version)
    return paused, paused, sent


def _connect(trainer: Any, original_init: Callable[[Any], None]) -> server.ServerSync | None:
    """Return the sync to the trainer's server, None if TRL's code is to be used. Collective."""
    from trl.distributed import DistributedBackend

    transfer, arguments = trainer.weight_transfer, trainer.args
    server.start_process_group()
    if not broadcast_value(_is_trls(transfer), bool):
        return None
    server.on_rank0(lambda: trainer.vllm_client.wait_for_server_ready())
    obstacle = server.obstacle_of(trainer.model, DistributedBackend(trainer.accelerator))
    url, device = arguments.vllm_server_base_url, trainer.accelerator.device
    if server.takes_slices(url, obstacle, device):
        return server.ServerSync(url, arguments.weight_sync_timeout / _WAITS)
    server.on_rank0(lambda: original_init(transfer))
    return None


def _is_trls(transfer: Any) -> bool:
    """Tell whether a transfer is of one of TRL's own classes, not of a user's."""
    kind = type(transfer)
    return kind.__module__.startswith("trl.") and kind.__name__ == "WeightTransferClient"
