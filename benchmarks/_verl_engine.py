"""verl's training worker, the actor of its PPO trainers, on the CPU in this process.

verl (0.9) trains on accelerators; a platform class is its way to add one. Here it is the CPU, with
gloo. Needs verl with its requirements: the environment of `python -m tools.dropins verl`.
"""

from __future__ import annotations

import contextlib
import os
import types
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl  # noqa: F401
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_base import PlatformBase


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
        return "CPU"

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


set_platform(PlatformCpu())

from verl import DataProto  # noqa: E402
from verl.models.transformers import monkey_patch  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import (  # noqa: E402
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.utils import losses  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding  # noqa: E402

vars(monkey_patch)["is_trl_available"] = lambda: False  # TRL may be of a release unknown to verl
EngineRegistry.register("language_model", ["fsdp2"], "cpu")(FSDPEngineWithLMHead)


def start_process_group() -> None:
    """Join torchrun's process group, or make one of this process alone."""
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (single | {"MASTER_PORT": "0"}).items():  # verl's Worker reads these
        os.environ.setdefault(name, value)
    if os.environ["MASTER_PORT"] == "0":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")


def training_worker(
    folder: Path | str, max_tokens: int, mini_batch: int, use_fused_kernels: bool = False
) -> TrainingWorker:
    """Return verl's worker for the model in `folder`: FSDP2, packed tokens, KL loss, AdamW."""
    model = HFModelConfig(
        path=str(folder), load_tokenizer=False, use_remove_padding=True,
        enable_gradient_checkpointing=False, use_fused_kernels=use_fused_kernels,
        fused_kernel_options={"impl_backend": "torch"},
        override_config={"attn_implementation": "sdpa"},
    )  # fmt: skip
    precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine = FSDPEngineConfig(
        strategy="fsdp2", forward_only=False, use_torch_compile=False, use_dynamic_bsz=True,
        max_token_len_per_gpu=max_tokens, infer_max_token_len_per_gpu=max_tokens,
        mixed_precision=precision,
    )  # fmt: skip
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=1e-4, total_training_steps=100),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    actor = ActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, ppo_mini_batch_size=mini_batch,
        use_kl_loss=True, kl_loss_coef=0.01, kl_loss_type="low_var_kl", entropy_coeff=1e-3,
    )  # fmt: skip
    worker.set_loss_fn(partial(losses.ppo_loss, config=actor))
    return worker


def update(worker: TrainingWorker, batch: dict[str, Any]) -> dict[str, Any]:
    """Run verl's actor update on padded tensors, as its trainer does; return the metrics."""
    count = batch["input_ids"].shape[0] * dist.get_world_size()
    data = DataProto.from_single_dict(batch, meta_info={"temperature": 0.9}).to_tensordict()
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(
        data, calculate_entropy=True, distillation_use_topk=False, distillation_only=False,
        global_batch_size=count, mini_batch_size=count, epochs=1, seed=0,
        dataloader_kwargs={"shuffle": False}, compute_loss=True,
    )  # fmt: skip
    return tu.get(worker.train_mini_batch(data), "metrics")
