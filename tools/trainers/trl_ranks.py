"""One rank of a TRL trainer that generates with a vLLM server: `python -m tools.trainers.trl_ranks`.

Started by accelerate or torchrun with the settings, a JSON object, as its only argument. Rank 0
writes `FOLDER/result.json` and the trained weights, as `save_pretrained` does, to `FOLDER/trained`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.trainers import trl_on_cpu

PROMPTS = ["w5 w9 w33", "w40 w8", "w17 w3 w60 w71", "w99 w4"]


@dataclass(frozen=True)
class Settings:
    """trainer: "grpo" or "async". sync: whose, "trl" or "hybridengine". fsdp: FSDP2, else DDP."""

    folder: str
    model: str
    url: str
    trainer: str
    sync: str
    fsdp: bool
    steps: int = 3


def rewards(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [len(set(ids)) / 8 + ids[0] / 101 for ids in completion_ids]


def arguments(settings: Settings) -> dict[str, Any]:
    fsdp = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    sharded: dict[str, Any] = {"fsdp": True, "fsdp_config": fsdp} if settings.fsdp else {}
    return {
        "output_dir": settings.folder, "use_cpu": True, "bf16": False, "report_to": [],
        "max_steps": settings.steps, "learning_rate": 1e-2, "logging_steps": 1, "seed": 3,
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8,
        "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False,
        "vllm_server_base_url": settings.url, **sharded,
    }  # fmt: skip


def grpo(settings: Settings) -> tuple[Any, Any]:
    """Train; return the trainer, and what syncs its weights once more."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32),
        rewards,
        GRPOConfig(
            **arguments(settings), use_vllm=True, vllm_mode="server",
            generation_kwargs={"seed": 7}, vllm_server_timeout=60,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}),
        processing_class=AutoTokenizer.from_pretrained(settings.model),
    )  # fmt: skip
    trainer.train()
    return trainer, trainer.vllm_generation.sync_weights


def save(model: Any, folder: Path) -> None:
    """Write the full weights of a sharded or plain model, collectively, from rank 0."""
    from torch.distributed.tensor import DTensor

    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)


def main(settings: Settings) -> None:
    trl_on_cpu.replace(settings.sync)
    if settings.sync == "hybridengine":
        from hybridengine.integrations import trl

        trl.patch("sync", "async_sync")
    train = {"grpo": grpo}[settings.trainer]
    trainer, sync = train(settings)
    sync()
    model = trainer.accelerator.unwrap_model(trainer.model)
    save(model, Path(settings.folder) / "trained")
    reports = [trl_on_cpu.report_of(trainer)]
    if trainer.accelerator.num_processes > 1:
        gathered: list[Any] = [None] * trainer.accelerator.num_processes
        dist.all_gather_object(gathered, reports[0])
        reports = gathered
    names = ("loss", "grad_norm", "reward", "entropy")
    result = {
        "parameters": {type(p).__name__ for p in model.parameters()}.pop(),
        "sync": reports,
        "log": [{n: log[n] for n in names if n in log} for log in trainer.state.log_history
                if "loss" in log],
    }  # fmt: skip
    if trainer.accelerator.is_main_process:
        (Path(settings.folder) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
