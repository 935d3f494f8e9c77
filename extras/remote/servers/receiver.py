"""Lets servers take part in weight syncs, with the interface of a `WeightReceiver`."""

from __future__ import annotations

import torch.distributed as dist

from hybridengine.remote.servers.pool import ServerPool
from hybridengine.remote.sync.records import EngineInfo, SyncState, SyncStore
from hybridengine.sync.checksums import EngineState


class ServerReceiver:
    """Looks for syncs to the servers of `pool`; the workers of the servers receive the weights.

    store: the sender's. The trainers are told of lost servers, so that they do not wait for them.
    """

    def __init__(self, pool: ServerPool, store: dist.Store) -> None:
        self._pool, self._store = pool, SyncStore(store)
        self._last = 0  # number of the last sync
        self.engine_state: EngineState | None = None  # of a `WeightReceiver`; servers have theirs

    def pending(self) -> bool:
        """Return whether a sync waits for one of the servers."""
        state = self._open_sync()
        return state is not None and bool(self._invited(state))

    def receive(self) -> None:
        """Update the servers that a sync waits for; does nothing if there is none."""
        if (state := self._open_sync()) is None or not (infos := self._invited(state)):
            return
        self._last = state.number

        def tell(index: int, reason: str) -> None:
            self._store.set(f"{state.number}/state/{infos[index].key}", reason)

        self._pool.update(state.version, infos, tell)

    def _open_sync(self) -> SyncState | None:
        state = self._store.get_sync()
        return state if state and state.is_open and state.number != self._last else None

    def _invited(self, state: SyncState) -> dict[int, EngineInfo]:
        """Return the own servers, as they are now, that take part; tell of those that are lost."""
        infos = {}
        for index, reason in self._pool.joined().items():
            info: EngineInfo | None = self._store.get(f"engine/{index}", EngineInfo)
            if info is None or state.invited.get(index) != info.incarnation:
                continue
            if reason:
                self._store.set(f"{state.number}/state/{info.key}", reason)
            else:
                infos[index] = info
        return infos
