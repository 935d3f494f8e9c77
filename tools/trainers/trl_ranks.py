"""One rank of a TRL trainer that generates with a vLLM server.

`torchrun … -m tools.trainers.trl_ranks SETTINGS`, a JSON object (`Settings`). Rank 0 writes
`FOLDER/result.json` and the trained weights, as `save_pretrained` does, to `FOLDER/trained`.
"""

from __future__ import annotations

import json
import queue
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hybridengine.run.messages import all_gather_values
from tools.trainers import trl_on_cpu

PROMPTS = ["w5 w9 w33", "w40 w8", "w17 w3 w60 w71", "w99 w4"]
BATCH = 4  # completions per rank and step
LENGTH = 8  # tokens of a completion


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
    group_port: int = 51216


def reward(ids: list[int]) -> float:
    return len(set(ids)) / LENGTH + ids[0] / 101


def rewards(completion_ids: list[list[int]], **columns: Any) -> list[Any]:
    return [reward(ids) for ids in completion_ids]


def arguments(settings: Settings) -> dict[str, Any]:
    fsdp = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    sharded: dict[str, Any] = {"fsdp": True, "fsdp_config": fsdp} if settings.fsdp else {}
    return {
        "output_dir": settings.folder,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "max_steps": settings.steps,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "seed": 3,
        "per_device_train_batch_size": BATCH,
        "num_generations": 4,
        "save_strategy": "no",
        "max_completion_length": LENGTH,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "vllm_server_base_url": settings.url,
        "vllm_server_timeout": 60,
        **sharded,
    }


def grpo(settings: Settings) -> tuple[Any, Callable[[], None]]:
    """Return the trainer, and what syncs its weights after the last step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32),
        rewards,
        GRPOConfig(
            **arguments(settings),
            use_vllm=True,
            vllm_mode="server",
            vllm_group_port=settings.group_port,
            generation_kwargs={"seed": 7},
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}),
        processing_class=AutoTokenizer.from_pretrained(settings.model),
    )

    def sync() -> None:
        trl_on_cpu.MOVED.update(received=0, sent=0)
        trainer.vllm_generation.sync_weights()

    return trainer, sync


class Rollouts:
    """Rollouts of AsyncGRPOTrainer that are the same in every run with equal weights.

    Each new version of the weights generates one batch; the first one generates two, because the
    trainer reads one batch ahead.
    """

    def __init__(self, settings: Settings, world_size: int) -> None:
        self._url, self._size = settings.url, BATCH * world_size
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        for batch in range(2 if model_version == 1 else 1):
            for i in range(self._size):
                self.rollout_buffer.put(self._sample(model_version, batch * self._size + i))

    def _sample(self, version: int, index: int) -> Any:
        import numpy as np
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        prompt = [5 + index, 9, 33]
        body = {
            "prompt": prompt,
            "max_tokens": LENGTH,
            "seed": 7 + index,
            "logprobs": 0,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            choice = json.loads(answer.read())["choices"][0]
        ids, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        rows = [0] * len(prompt) + [1] * len(ids), [0.0] * len(prompt) + log_probs
        return RolloutSample(
            [],
            [],
            np.array(prompt + ids),
            np.array(rows[0]),
            np.array(rows[1], np.float32),
            reward(ids) - 1.0,
            version,
            version * self._size + index,
            {"reward": reward(ids)},
            time.time(),
        )


def async_grpo(settings: Settings) -> tuple[Any, Callable[[], None]]:
    """Return the trainer, and what syncs its weights after the last step."""
    from accelerate import PartialState
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    rollouts: Any = Rollouts(settings, PartialState(cpu=True).num_processes)
    trainer = AsyncGRPOTrainer(
        settings.model,
        args=AsyncGRPOConfig(
            **arguments(settings),
            token_budget=0,
            dtype="float32",
            weight_sync_steps=1,
            weight_sync_timeout=200,
            max_staleness=2,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}),
        reward_funcs=rewards,
        rollout_worker=rollouts,
    )
    return trainer, lambda: None  # each step ends with a sync


def save(model: Any, folder: Path) -> None:
    """Write the full weights of a sharded or plain model, collectively, from rank 0."""
    from torch.distributed.tensor import DTensor

    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)


class CountOneStep(TrainerCallback):
    """Lets `trl_on_cpu.MOVED` count from the beginning of each step, which has one sync."""

    def on_step_begin(self, *args: Any, **options: Any) -> None:
        trl_on_cpu.MOVED.update(received=0, sent=0)


def moved(trainer: Any, sync: str) -> list[dict[str, int]]:
    """Return what the last sync moved, of each rank."""
    own = dict(trl_on_cpu.MOVED)
    if sync == "hybridengine":
        report = getattr(trainer, "vllm_generation", trainer)._hybridengine_server.report
        own = {"received": report.bytes_received, "sent": report.bytes_sent}
    return all_gather_values(own, dict[str, int]) if dist.is_initialized() else [own]


def main(settings: Settings) -> None:
    trl_on_cpu.replace(settings.sync)
    if settings.sync == "hybridengine":
        from hybridengine.integrations import trl

        trl.patch("sync", "async_sync")
    trainer, sync = {"grpo": grpo, "async": async_grpo}[settings.trainer](settings)
    trainer.add_callback(CountOneStep())
    trainer.train()
    sync()
    bytes_moved = moved(trainer, settings.sync)
    model = trainer.accelerator.unwrap_model(trainer.model)
    save(model, Path(settings.folder) / "trained")
    names = ("loss", "grad_norm", "reward", "entropy", "kl", "ratio")
    logs = [log for log in trainer.state.log_history if "loss" in log]
    result = {
        "parameters": type(next(model.parameters())).__name__,
        "moved": bytes_moved,
        "log": [{name: log[name] for name in names if name in log} for log in logs],
    }
    if trainer.accelerator.is_main_process:
        (Path(settings.folder) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
