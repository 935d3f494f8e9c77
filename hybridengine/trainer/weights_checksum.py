"""The checksum of the weights that responses were sampled from, which only syncs may change."""

from __future__ import annotations

from hybridengine.config import RLConfig
from hybridengine.errors import RolloutError
from hybridengine.reshard.target import EngineState
from hybridengine.rollout import RolloutEngine
from hybridengine.sharding.weight_target import target_of


class WeightsChecksum:
    """Of an engine in this process, where rollout files are written.

    Not of servers, of engines that take weights inside responses, and of adapters, which are not
    among an engine's weights.
    """

    def __init__(self, config: RLConfig, engine: RolloutEngine) -> None:
        rollout = config.rollout
        plain = not rollout.servers and rollout.in_flight_update == "off"
        self._is_wanted = (
            plain and config.trainer.rollout_freq > 0 and config.reshard.lora == "merged"
        )
        self._engine = engine
        self._synced: EngineState | None = None

    def after_sync(self) -> None:
        """Note what a sync has left in the engine."""
        if self._is_wanted:
            self._synced = EngineState.of(target_of(self._engine))

    def __call__(self) -> str:
        """Return the checksum; "" where it is not wanted.

        Raises RolloutError if the weights are not those that the last sync has left.
        """
        if not self._is_wanted:
            return ""
        now = EngineState.of(target_of(self._engine))
        if self._synced is None or now != self._synced:
            raise RolloutError(
                f"the engine's weights have changed since the sync to version {now.version} "
                f"(checksum {now.checksum}, then {self._synced and self._synced.checksum}): "
                "something other than the trainer writes to them, and responses are not the "
                "policy's. `hybridengine doctor --attach --verify` names the tensors"
            )
        return now.checksum
