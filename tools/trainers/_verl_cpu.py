"""The CPU as a platform of verl, in every process of a verl job.

    VERL_USE_EXTERNAL_MODULES=tools.trainers._verl_cpu

What of verl refuses a CPU and is replaced here:

- its platform, of which it has one per accelerator: here the CPU, with gloo. Ray is told of GPUs
  that do not exist (`ray_init.num_gpus`), since verl counts and assigns "GPU";
- the process group, for which verl names the backends of the CPU and of its accelerator;
- the engine of FSDP2, which is registered for CUDA: `VERL_ENGINE_DEVICE` chooses it;
- TRL, whose releases verl knows up to 0.27: as if it were not installed;
- vLLM packs its weights for the CPU as it loads them, after which verl's `load_weights` has nowhere
  to write: they stay plain.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from typing import Any

import torch
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_base import PlatformBase
from verl.utils import import_utils


class _CpuModule(types.ModuleType):
    """torch.cpu, and 0 for what it lacks (memory statistics, cache)."""

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0

    def get_device_name(self) -> str:
        return "CPU"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *args, **kwargs: 0)


class PlatformCpu(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuModule("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:  # what .to() takes
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Stand for what a CPU does not have."""

    set_device = synchronize = manual_seed = manual_seed_all = _nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing


_init_process_group = torch.distributed.init_process_group


def _one_backend(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    backend = "cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend
    _init_process_group(backend, *args, **kwargs)


torch.distributed.init_process_group = _one_backend
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # the engine that verl registered for FSDP2
set_platform(PlatformCpu())
vars(import_utils)["is_trl_available"] = lambda: False
if "vllm" in sys.modules:
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
