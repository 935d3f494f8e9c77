"""Worker extensions of the trainers that also load a checkpoint, as vLLM's own loader does.

skyrl, areal, nemo: the trainer's extension with `load_checkpoint`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_EXTENSIONS = {
    "skyrl": "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap."
    "NewInferenceWorkerWrap",
    "areal": "hybridengine.integrations.areal_server.WorkerExtension",
    "nemo": "nemo_rl.models.generation.vllm.vllm_backend."
    "VllmInternalWorkerExtensionWithCheckpointEngine",
}


class _Loads:
    def load_checkpoint(self: Any, folder: str) -> None:
        """Write a checkpoint into the worker's model, in place."""
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config

        weights = load_file(f"{folder}/model.safetensors")
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(iter(weights.items()))


@cache
def __getattr__(name: str) -> Any:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    if name not in _EXTENSIONS:
        raise AttributeError(name)
    if name == "nemo" and not torch.cuda.is_available():  # it marks its calls for a profiler
        for function in ("range_push", "range_pop"):
            setattr(torch.cuda.nvtx, function, lambda *_: 0)
    return type(name, (_Loads, resolve_obj_by_qualname(_EXTENSIONS[name])), {})
