"""The checksum of the weights that responses were sampled from, which only syncs may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from hybridengine.engine.interface import RolloutEngine
from hybridengine.run.config import RLConfig
from hybridengine.run.errors import RolloutError
from hybridengine.sync.weight_target import EngineState, target_of

_ENGINE = "the engine"  # of this process


class HeldWeights(Protocol):
    """The version and the checksum of the weights that an engine holds."""

    @property
    def version(self) -> int | None: ...
    @property
    def checksum(self) -> str: ...


class WeightsChecksum:
    """Compares the weights of engines with what the last sync wrote; for runs that write rollouts.

    read: returns what the engines hold, by their names; by default that of `engine` itself.

    With unmerged adapters the checksum is that of the adapters and of what else a sync writes.
    """

    def __init__(
        self,
        config: RLConfig,
        engine: RolloutEngine,
        read: Callable[[], Mapping[str, HeldWeights]] | None = None,
    ) -> None:
        self._is_wanted = config.trainer.rollout_freq > 0
        self._engine, self._read = engine, read or self._read_engine
        self._synced: Mapping[str, HeldWeights] = {}
        self._of_version = dict[int, str]()  # the newest one, and those of responses that run

    def before_sync(self) -> None:
        """Check the weights that running responses were sampled from, before others come."""
        if self._engine.in_flight is not None and self._synced:
            self._check()

    def after_sync(self, left: EngineState | None = None) -> None:
        """Note what a sync has left in the engine.

        left: its state, where the sync knows it.

        Raises RolloutError if an engine has not taken part.
        """
        if not self._is_wanted:
            return
        self._synced = self._read() if left is None else {_ENGINE: left}
        newest = self._engine.weight_version
        for name, held in self._synced.items():
            expected = next(iter(self._synced.values())).checksum
            self._of_version[newest or 0] = expected  # a version may be synced several times
            if (held.version, held.checksum) != (newest, expected):
                raise RolloutError(
                    f"{name} missed the sync to version {newest}: it has weights of version "
                    f"{held.version} with the checksum {held.checksum}, expected is {expected}. "
                    "Something other than the trainer writes to it; start it again"
                )

    def __call__(self) -> Mapping[int, str]:
        """Return the checksum by version, of those since the last call; {} where not wanted.

        Raises RolloutError if the weights are not those that the last sync has left.
        """
        self._check()
        checksums = dict(self._of_version)
        newest = max(checksums, default=0)
        self._of_version = {v: x for v, x in checksums.items() if v == newest}
        return checksums

    def _check(self) -> None:
        if not self._is_wanted:
            return
        for name, held in self._read().items():
            synced = self._synced.get(name)
            if held != synced:
                raise RolloutError(
                    f"the weights of {name} have changed since the sync to version {held.version} "
                    f"(checksum {held.checksum}, then {synced and synced.checksum}): something "
                    "other than the trainer writes to them, and responses are not the policy's. "
                    "`hybridengine doctor --attach --verify` names the tensors"
                )

    def _read_engine(self) -> Mapping[str, HeldWeights]:
        return {_ENGINE: EngineState.of(target_of(self._engine))}
