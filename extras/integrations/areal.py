"""AReaL's weight update by ours (areal 1.0, FSDP engines, vLLM servers): exact slices.

    from hybridengine.integrations import areal

    areal.patch()                   # in the training script, before its trainer is made

In single-controller mode AReaL's workers are patched by the command that they are started with:

    actor.scheduling_spec[0].cmd: python -m hybridengine.integrations.areal
    rollout.scheduling_spec[0].cmd: python -m hybridengine.integrations.areal

`FSDPEngine.update_weights` with weight_update_mode xccl then opens a store instead of a process
group, and every rank sends slices of its own shards, where AReaL gathers each parameter and rank 0
broadcasts it. The servers are AReaL's, with our backend of vLLM's weight-transfer interface and a
worker extension that follows AReaL's own calls (`hybridengine.integrations.areal_server`).
HYBRIDENGINE_SECRET must be in the environment of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hybridengine.remote.vllm_transfer.engine_sender import EngineSender, module_arguments
from hybridengine.run.messages import broadcast_value, run_on_all_ranks, run_on_rank0
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.weight_target import ReshardError

from ._patching import Patches

__all__ = ["patch", "patched", "unpatch"]

_ENGINE = "engine.fsdp_engine.FSDPEngine"
_CONFIG = "api.cli_args.vLLMConfig"
_SERVER = "hybridengine.integrations.areal_server"
_TIMEOUT_S = 300.0
_on_rank0 = partial(run_on_rank0, error_type=ReshardError)


def _init_weight_update_from_distributed(self: Any, meta: Any) -> None:
    """Open the store and let the workers of all servers join. Collective."""
    from areal.utils.network import gethostip

    run_on_all_ranks(lambda: _check(self, meta), LayoutError)
    host = broadcast_value(gethostip(), str)
    sender = EngineSender(host, timeout_s=_TIMEOUT_S)
    sender.set_model(module_arguments(self.model), meta.gen_allocation.parallel.dp_size)
    self.weight_update_group_names = ["hybridengine"]
    self.weight_update_master_addr = meta.nccl_master_address = host
    self.weight_update_master_port = meta.nccl_master_port = sender.port
    meta.nccl_group_name = "hybridengine"
    engine = self.rollout_engine
    _on_rank0(lambda: _wait(engine.init_weights_update_group(meta)), "joining of the servers")
    self.hybridengine_sender, self.hybridengine_version = sender, 0


def _update_weights_from_distributed(self: Any, meta: Any) -> None:
    """Send the current weights to all servers, which are paused meanwhile. Collective.

    Raises ReshardError, on every rank, if a server does not have them; the generation then stays
    paused, and the next call sends to all again.
    """
    meta.nccl_master_address = self.weight_update_master_addr
    meta.nccl_master_port = self.weight_update_master_port
    self.hybridengine_version += 1
    meta.nccl_group_name = str(self.hybridengine_version)  # reaches the workers as it is
    engine = self.rollout_engine

    def begin() -> Any:
        engine.pause_generation()
        return engine.update_weights_from_distributed(meta, [])

    future = _on_rank0(begin, "pausing of the servers")
    try:
        report = self.hybridengine_sender.send(self.hybridengine_version)
    except Exception as failure:
        if future is not None and future.done() and future.exception():  # often the cause
            failure.add_note(str(future.exception()))
        raise
    _on_rank0(lambda: _wait(future), "receiving of the servers")
    self.hybridengine_report = report
    _on_rank0(lambda: engine.continue_generation(), "continuing of the servers")


def _check(engine: Any, meta: Any) -> None:
    allocation = meta.gen_allocation
    if allocation is None or allocation.backend != "vllm":
        raise LayoutError(
            f"rollout.backend: got {allocation and allocation.backend!r}, expected 'vllm'. Weights "
            "are written into vLLM's workers only; unpatch for other servers"
        )
    if allocation.parallel.pp_size > 1:
        raise LayoutError(
            f"rollout.backend: got pipeline parallelism {allocation.parallel.pp_size}, expected 1"
        )
    if engine.config.use_lora:
        raise LayoutError(
            "use_lora: AReaL's requests name an adapter that its servers hold, which is not sent; "
            "unpatch for LoRA"
        )


def _wait(future: Any) -> None:
    """Wait for a call of the servers."""
    try:
        future.result(timeout=_TIMEOUT_S)
    except TimeoutError as error:
        raise ReshardError(f"they have not answered within {_TIMEOUT_S:g} s") from error


def build_args(  # type: ignore[no-untyped-def]
    vllm_config, tp_size, pp_size, host=None, port=None, dist_init_addr=None, n_nodes=1, node_rank=0
) -> dict[str, Any]:
    """Return the options of AReaL's server, with our backend and worker extension."""
    arguments: dict[str, Any] = _PATCHES.original(f"{_CONFIG}.build_args")(
        vllm_config, tp_size, pp_size, host, port, dist_init_addr, n_nodes, node_rank
    )
    arguments["weight_transfer_config"] = '{"backend": "hybridengine"}'
    arguments["worker_extension_cls"] = f"{_SERVER}.WorkerExtension"
    return arguments


def build_cmd_from_args(args: dict[str, Any]) -> list[str]:
    """Return the command of AReaL's server, started by ours."""
    from areal.api.cli_args import get_py_cmd

    return get_py_cmd(_SERVER, args)


_OURS: dict[str, Callable[..., Any]] = {
    f"{_ENGINE}._init_weight_update_from_distributed": _init_weight_update_from_distributed,
    f"{_ENGINE}._update_weights_from_distributed": _update_weights_from_distributed,
    f"{_CONFIG}.build_args": staticmethod(build_args),
    f"{_CONFIG}.build_cmd_from_args": staticmethod(build_cmd_from_args),
}
_PATCHES = Patches("areal", {"weight_sync": _OURS})
patch, unpatch, patched = _PATCHES.patch, _PATCHES.unpatch, _PATCHES.patched


if __name__ == "__main__":
    from areal.infra.rpc.rpc_server import main

    patch()
    main()
