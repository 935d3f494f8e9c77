"""Engines in processes of their own, driven by trainers through a store as vLLM's are by HTTP.

client = StoreClient(port, num_ranks=2)      # on trainer rank 0: a VLLMWeightSyncClient
follow(port, rank, {"start_weight_update": …, "update_weights": …})    # on each engine rank
client.call("compare", 1.5)                  # any other command; its JSON value of each rank
client.call("end")
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partialmethod
from itertools import count
from typing import Any

import torch.distributed as dist

__all__ = ["StoreClient", "follow"]

_WAIT = timedelta(seconds=300)


def _store(port: int) -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", port, None, is_master=False, wait_for_workers=False, timeout=_WAIT
    )


class StoreClient:
    """Has the four methods of vLLM's protocol `VLLMWeightSyncClient`.

    port: of the test's store. name: of the engine.
    """

    def __init__(self, port: int, num_ranks: int, name: str = "engine") -> None:
        self._store, self._num_ranks, self._name = _store(port), num_ranks, name
        self._numbers = count()

    def call(self, command: str, *arguments: Any) -> list[Any]:
        """Return what each rank of the engine returns; raise the first error."""
        number = next(self._numbers)
        self._store.set(f"{self._name}/{number}", json.dumps([command, arguments]))
        keys = [f"{self._name}/{number}/{rank}" for rank in range(self._num_ranks)]
        answers = [json.loads(self._store.get(key)) for key in keys]
        for _, error in answers:
            if error:
                raise RuntimeError(error)
        return [value for value, _ in answers]

    init_weight_transfer_engine = partialmethod(call, "init_weight_transfer_engine")
    start_weight_update = partialmethod(call, "start_weight_update")
    update_weights = partialmethod(call, "update_weights")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)


def follow(
    port: int, rank: int, commands: Mapping[str, Callable[..., Any]], name: str = "engine"
) -> None:
    """Run the commands of a `StoreClient` until it calls "end"."""
    store = _store(port)
    for number in count():
        command, arguments = json.loads(store.get(f"{name}/{number}"))
        value, error = None, ""
        try:
            value = commands[command](*arguments) if command != "end" else None
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        store.set(f"{name}/{number}/{rank}", json.dumps([value, error]))
        if command == "end":
            return
