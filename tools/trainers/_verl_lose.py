"""Kill a vLLM worker of verl in its second weight sync, the first after a training step.

    VERL_USE_EXTERNAL_MODULES=...,tools.trainers._verl_lose VERL_LOSE=CALL VERL_RECORD=FOLDER

Worker 1 of the server is killed as CALL arrives: `start_weight_update`, so that it is lost between
two syncs, or `update_weights`, when the trainers have begun to send. FOLDER/killed then exists, and
FOLDER/generated if the engine returns any output after that.
"""

from __future__ import annotations

import os
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

from tools.trainers._after_import import after_import

_CALL = os.environ["VERL_LOSE"]
_FOLDER = Path(os.environ["VERL_RECORD"])


def _kill_in_the_second_sync(module: types.ModuleType) -> None:
    """Of vLLM's `async_llm`."""
    engine = module.AsyncLLM
    call, generate, calls = getattr(engine, _CALL), engine.generate, 0

    async def kill_and_call(self: Any, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            children = psutil.Process().children(recursive=True)
            [worker] = [each for each in children if "Worker_TP1" in " ".join(each.cmdline())]
            worker.kill()
            (_FOLDER / "killed").touch()
        await call(self, *arguments)

    async def record_outputs(self: Any, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        async for output in generate(self, *arguments, **options):
            if calls >= 2:
                (_FOLDER / "generated").touch()
            yield output

    setattr(engine, _CALL, kill_and_call)
    engine.generate = record_outputs


after_import("vllm.v1.engine.async_llm", _kill_in_the_second_sync)
