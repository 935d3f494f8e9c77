"""What of TRL and accelerate refuses a CPU, replaced in the processes of `trl_ranks`."""

from __future__ import annotations

from typing import Any


def replace(sync: str) -> None:
    """sync: whose weight sync runs, "trl" or "hybridengine"."""
    let_accelerate_shard()


def let_accelerate_shard() -> None:
    """Let accelerate apply FSDP on CPU ranks, as on those of a GPU."""
    from accelerate.state import AcceleratorState, DistributedType

    init = AcceleratorState.__init__

    def init_and_shard(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        plugin = self.__dict__.setdefault("fsdp_plugin", fsdp_plugin)  # kept by later instances
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = init_and_shard


def report_of(trainer: Any) -> dict[str, Any]:
    """Return what the last sync of this rank moved; {} for TRL's own."""
    holder = getattr(trainer, "vllm_generation", trainer)
    sync = getattr(holder, "_hybridengine_server", None)
    if sync is None:
        return {}
    return {"bytes_sent": sync.report.bytes_sent, "bytes_received": sync.report.bytes_received}
