"""verl's training worker, the actor of its PPO trainers, on the CPU in this process.

Needs verl with its requirements: the environment of `python -m tools.dropins verl`.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tools.trainers import _verl_cpu  # noqa: F401  first: it makes the CPU verl's platform

# isort: split
from verl import DataProto
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils import losses
from verl.workers.utils.padding import left_right_2_no_padding


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
        path=str(folder),
        load_tokenizer=False,
        use_remove_padding=True,
        enable_gradient_checkpointing=False,
        use_fused_kernels=use_fused_kernels,
        fused_kernel_options={"impl_backend": "torch"},
        override_config={"attn_implementation": "sdpa"},
    )
    precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        forward_only=False,
        use_torch_compile=False,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=max_tokens,
        infer_max_token_len_per_gpu=max_tokens,
        mixed_precision=precision,
    )
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
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        ppo_mini_batch_size=mini_batch,
        use_kl_loss=True,
        kl_loss_coef=0.01,
        kl_loss_type="low_var_kl",
        entropy_coeff=1e-3,
    )
    worker.set_loss_fn(partial(losses.ppo_loss, config=actor))
    return worker


def update(worker: TrainingWorker, batch: dict[str, Any]) -> dict[str, Any]:
    """Run verl's actor update on padded tensors, as its trainer does; return the metrics."""
    count = batch["input_ids"].shape[0] * dist.get_world_size()
    data = DataProto.from_single_dict(batch, meta_info={"temperature": 0.9}).to_tensordict()
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(
        data,
        **dict(compute_loss=True, calculate_entropy=True),
        **dict(distillation_use_topk=False, distillation_only=False),
        **dict(global_batch_size=count, mini_batch_size=count, epochs=1, seed=0),
        dataloader_kwargs={"shuffle": False},
    )
    return tu.get(worker.train_mini_batch(data), "metrics")
