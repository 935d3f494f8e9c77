"""End a worker of every vLLM server as it receives the second weight sync of a verl job."""

from __future__ import annotations

import os
import signal
from types import ModuleType
from typing import Any

from tools.trainers._after_import import after_import


def _end_in_second_sync(module: ModuleType) -> None:
    receive = module.HybridEngineTransfer.receive_weights

    def receive_or_end(self: Any, update_info: Any) -> None:
        if update_info.version == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        receive(self, update_info)

    module.HybridEngineTransfer.receive_weights = receive_or_end


after_import("hybridengine.rollout.vllm.transfer", _end_in_second_sync)
