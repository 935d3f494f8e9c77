"""The exact weight sync as a checkpoint engine of verl, "hybridengine".

Trainers and vLLM servers on different GPUs: with `hybridengine.integrations.verl.sync`,

    actor_rollout_ref.rollout.checkpoint_engine.backend: hybridengine

makes every trainer rank send slices of its shards directly to the servers' workers.

A vLLM engine in the trainer's process, without Ray's servers:

    actor_rollout_ref.rollout.checkpoint_engine.backend: hybridengine
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module:
        hybridengine.integrations.verl.checkpoint_engine

and once in every trainer process, which builds a `vllm.LLM` as
`hybridengine.integrations.vllm.connect` describes:

    worker.checkpoint_engine.attach(worker.actor.engine, llm)

In both cases nothing is gathered, and verl's generator of full tensors is not read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from verl.checkpoint_engine import base

from hybridengine.integrations.verl.weights import ShardedWeights
from hybridengine.integrations.vllm import reshard
from hybridengine.sync.layout import LayoutError

if TYPE_CHECKING:
    from vllm import LLM

    from hybridengine.integrations.verl.servers import ServerSender
    from hybridengine.sync.resharder import SyncReport

__all__ = ["ReshardCheckpointEngine"]

server_of_this_process: str | None = None  # of a rollout worker: name of its vLLM server


_CheckpointEngine: Any = base.CheckpointEngine
_register: Any = base.CheckpointEngineRegistry.register


@_register("hybridengine")
class ReshardCheckpointEngine(_CheckpointEngine):
    """Weights from verl's FSDP2 engine into vLLM. On every trainer and rollout worker.

    bucket_size, is_master: verl's; the reshard chooses the size of its buckets by free memory.
    """

    def __init__(self, bucket_size: int = 0, is_master: bool = False) -> None:
        self._engine: Any = None
        self._llm: LLM | None = None
        self._sender: ServerSender | None = None

    def attach(self, engine: Any, llm: LLM) -> None:
        """Set where weights come from, verl's training engine (`fsdp2`), and where they go."""
        self._engine, self._llm = engine, llm

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Write the trained weights into the attached LLM or the servers; return metrics.

        Every trainer rank calls it. weights: what verl's training engine returned.

        Raises LayoutError where there is no engine, or model and engine do not fit together;
        ReshardError where the sync failed.
        """
        report: SyncReport
        if self._llm is not None:
            report = reshard(self._engine.module, self._llm)
        elif self._sender is not None and isinstance(weights, ShardedWeights):
            report = self._sender.send(weights, global_steps)
        else:
            raise LayoutError(
                "the checkpoint engine 'hybridengine' has no vLLM engine: for verl's servers set "
                "VERL_USE_EXTERNAL_MODULES=hybridengine.integrations.verl.sync, for an engine in "
                "the trainer's process call attach(engine, llm)."
            )
        return {
            "update_weights/milliseconds": report.milliseconds,
            "update_weights/mib_received": report.bytes_received / 2**20,
            "update_weights/mib_sent": report.bytes_sent / 2**20,
        }

    def prepare(self) -> dict[str, Any]:
        """Return the server that this rollout worker belongs to, and the address of this node."""
        import ray

        return {"server": server_of_this_process, "address": ray.util.get_node_ip_address()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell trainers which servers there are; rollout workers only wait for them."""
        servers = {each["server"]: None for each in metadata[actor_wg_world_size:]}
        if None in servers:
            raise LayoutError(
                "a rollout worker does not know its vLLM server: set "
                "VERL_USE_EXTERNAL_MODULES=hybridengine.integrations.verl.sync in all processes"
            )
        addresses = {each["address"] for each in metadata}
        address = metadata[0]["address"] if len(addresses) > 1 else "127.0.0.1"
        actors, rollouts = actor_wg_world_size, rollout_world_size
        return (
            {"servers": [list(servers)] * actors, "address": [address] * actors},
            {"servers": [[]] * rollouts, "address": [""] * rollouts},
        )

    def init_process_group(self, servers: list[str], address: str) -> None:
        """Make the sender to `servers`, unless there is one."""
        if not servers or (self._sender is not None and self._sender.servers == servers):
            return
        from hybridengine.integrations.verl.servers import ServerSender
        from hybridengine.integrations.verl.weights import PATCHES

        PATCHES.patch()
        if self._sender is not None:
            self._sender.close()
        self._sender = ServerSender(servers, address)

    def finalize(self) -> None:
        """Do nothing: connections and plan stay for the next sync."""

    def receive_weights(self, global_steps: int | None = None) -> None:
        """Do nothing: the trainers write into the server's workers."""
