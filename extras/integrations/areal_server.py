"""AReaL's vLLM server on vLLM 0.32, whose workers receive slices: run as AReaL's module.

    python -m hybridengine.integrations.areal_server --model … --worker-extension-cls
        hybridengine.integrations.areal_server.WorkerExtension
        --weight-transfer-config '{"backend": "hybridengine"}'

`hybridengine.integrations.areal.patch` makes AReaL start it like this. AReaL 1.0.4 was written for
vLLM 0.19: the modules that have moved since get their old names, and `pause_generation` its old
option, before AReaL's module runs.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from typing import Any

from hybridengine.remote.vllm_transfer.engine_sender import PREFIX

__all__ = ["WorkerExtension", "serve"]

_MOVED = {
    "vllm.entrypoints.openai.api_server": "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.cli_args": "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.engine.protocol": "vllm.entrypoints.serve.engine.protocol",
    "vllm.entrypoints.openai.utils": "vllm.entrypoints.serve.utils.api_utils",
    "vllm.entrypoints.utils": "vllm.entrypoints.serve.utils.api_utils",
}


class WorkerExtension:
    """What AReaL's server calls in vLLM's workers, for the weights of the trainers' slices.

    Every method returns (whether it succeeded, a message), as AReaL's own extension.
    """

    def areal_init_update_weight_group(
        self: Any,
        master_address: str,
        master_port: str,
        rank_offset: int,
        world_size: int,
        backend: str,
        group_name: str,
    ) -> tuple[bool, str]:
        """Join the trainers' store. rank_offset: 1 + the number of workers of earlier servers."""
        index = (rank_offset - 1) // self.vllm_config.parallel_config.world_size
        info = {"host": master_address, "port": int(master_port), "prefix": PREFIX, "index": index}
        return _outcome(lambda: self.init_weight_transfer_engine(info))

    def areal_set_weight_meta(
        self: Any, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str
    ) -> tuple[bool, str]:
        """Note the version that follows; the others are of AReaL's broadcast, and empty."""
        self.hybridengine_version = int(group_name)
        return True, "Success"

    def areal_update_weight_xccl(self: Any) -> tuple[bool, str]:
        """Take part in one sync of the trainers."""

        def receive() -> None:
            self.start_weight_update()
            self.update_weights({"version": self.hybridengine_version})
            self.finish_weight_update()

        return _outcome(receive)


def _outcome(call: Any) -> tuple[bool, str]:
    try:
        call()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return True, "Success"


def serve() -> None:
    """Run AReaL's server module on this process's arguments."""
    from vllm.v1.engine.async_llm import AsyncLLM

    for old, new in _MOVED.items():
        sys.modules[old] = importlib.import_module(new)
    pause = AsyncLLM.pause_generation

    async def pause_generation(
        self: AsyncLLM, *, wait_for_inflight_requests: bool = False, **options: Any
    ) -> None:
        if wait_for_inflight_requests:
            options["mode"] = "wait"
        await pause(self, **options)

    AsyncLLM.pause_generation = pause_generation  # type: ignore[method-assign]
    runpy.run_module("areal.engine.vllm_ext.areal_vllm_server", run_name="__main__")


if __name__ == "__main__":
    serve()
