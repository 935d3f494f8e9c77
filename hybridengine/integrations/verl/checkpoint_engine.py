"""The reshard as a checkpoint engine of verl, for a vLLM engine in the trainer's process.

    actor_rollout_ref.rollout.checkpoint_engine.backend: hybridengine
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module:
        hybridengine.integrations.verl.checkpoint_engine

Once in every trainer process, which has the FSDP2 model and builds a `vllm.LLM` as
`hybridengine.integrations.vllm.connect` describes:

    worker.checkpoint_engine.attach(worker.actor.engine, llm)

Every `worker.update_weights(global_steps=…)` then moves the exact slices that this rank's engine
lacks, directly into its weights. verl's generator of full tensors is not read, so that nothing is
gathered. Engines in other processes, verl's default, cannot be attached: docs/dropins.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from hybridengine.integrations.vllm import reshard
from hybridengine.sharding.layout import LayoutError

if TYPE_CHECKING:
    from vllm import LLM

__all__ = ["ReshardCheckpointEngine"]


@CheckpointEngineRegistry.register("hybridengine")
class ReshardCheckpointEngine(CheckpointEngine):
    """Weights from verl's FSDP2 engine into the `LLM` of the same process; every rank calls.

    bucket_size, is_master: verl's; the reshard chooses the size of its buckets by free memory.
    """

    def __init__(self, bucket_size: int = 0, is_master: bool = False) -> None:
        self._engine: Any = None
        self._llm: LLM | None = None

    def attach(self, engine: Any, llm: LLM) -> None:
        """Set where weights come from, verl's training engine (`fsdp2`), and where they go."""
        self._engine, self._llm = engine, llm

    async def send_weights(
        self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Write the engine's current weights into the LLM; return metrics of the sync.

        weights: verl's generator of full tensors; is not read.

        Raises LayoutError where nothing is attached, or model and LLM do not fit together;
        ReshardError where the sync failed.
        """
        if self._llm is None:
            raise LayoutError(
                "no vLLM engine is attached to the checkpoint engine 'hybridengine': call "
                "attach(engine, llm) in every trainer process. An engine in another process "
                "cannot be attached; use the backend 'naive' or 'nccl' for it."
            )
        report = reshard(self._engine.module, self._llm)
        return {
            "update_weights/milliseconds": report.milliseconds,
            "update_weights/mib_received": report.bytes_received / 2**20,
        }

    def prepare(self) -> dict[str, Any]:
        """Return no metadata: ranks meet in the trainer's process group."""
        return {}

    def init_process_group(self, **kwargs: Any) -> None:
        """Do nothing: the trainer's process group is used."""

    def finalize(self) -> None:
        """Do nothing: buffers belong to the reshard."""

    @classmethod
    def build_topology(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: there are no rollout workers to connect to."""
        raise LayoutError(
            "the checkpoint engine 'hybridengine' writes into an engine of the trainer's process; "
            "rollout workers in other processes need the backend 'naive' or 'nccl'."
        )

    async def receive_weights(self, global_steps: int | None = None) -> NoReturn:
        """Raise, as `build_topology`: no other process receives."""
        self.build_topology()
