"""Kill a vLLM worker of verl during its second weight sync, the first after a training step.

    VERL_USE_EXTERNAL_MODULES=...,tools.trainers._verl_lose

Worker 1 of the server is killed when the trainers have begun to send.
"""

from __future__ import annotations

import types
from typing import Any

import psutil

from tools.trainers._after_import import after_import


def _kill_in_the_second_sync(module: types.ModuleType) -> None:
    """Of vLLM's `async_llm`."""
    update_weights, syncs = module.AsyncLLM.update_weights, 0

    async def update(self: Any, request: Any) -> None:
        nonlocal syncs
        syncs += 1
        if syncs == 2:
            children = psutil.Process().children(recursive=True)
            [worker] = [each for each in children if "Worker_TP1" in " ".join(each.cmdline())]
            worker.kill()
        await update_weights(self, request)

    module.AsyncLLM.update_weights = update


after_import("vllm.v1.engine.async_llm", _kill_in_the_second_sync)
