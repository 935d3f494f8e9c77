"""vLLM's worker for NeMo RL's extension, on vLLM 0.32.

    policy.generation.vllm_kwargs.worker_cls: hybridengine.integrations.nemo_rl_worker.Worker

NeMo RL's extension of vLLM's workers has a method `synchronize_device`, for its sparse refit. Since
vLLM 0.32 its workers have one of that name, and vLLM refuses an extension that hides one of theirs.
Importing this module, as vLLM does before it extends the worker, leaves vLLM's in place, and lets
the extension receive from a colocated policy of ours (`nemo_rl_colocated`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerBase

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker

from hybridengine.integrations.nemo_rl_colocated import receive_in_workers

__all__ = ["Worker"]

if hasattr(WorkerBase, "synchronize_device"):
    del VllmInternalWorkerExtension.synchronize_device
receive_in_workers()
