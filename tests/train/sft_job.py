"""A tiny SFT job with everything random in it: dropout, shuffling, ragged conversations."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PhiConfig

from hybridengine.run.config import SFTConfig, load_sft_config
from tests.tiny_models import SIZES, VOCAB, save_tiny

__all__ = ["save_checkpoint", "sft_settings", "start_run", "write_sft_job"]


def write_sft_job(folder: Path, dropout: float = 0.0, rows: int = 24, width: int = 32) -> Path:
    """Model and conversations in `folder`; the model knows dropout and ties no weights."""
    save_tiny("llama", folder / "model")  # for its tokenizer
    sizes = dict(
        hidden_size=width, head_dim=width // 4, intermediate_size=48, num_key_value_heads=4
    )
    config = PhiConfig(**SIZES | sizes, resid_pdrop=dropout, embd_pdrop=dropout)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    rng = random.Random(0)

    def words(n: int) -> str:
        return " ".join(f"w{rng.randrange(3, VOCAB)}" for _ in range(n))

    lines = [
        json.dumps({"prompt": words(rng.randrange(1, 9)), "response": words(rng.randrange(1, 14))})
        for _ in range(rows)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder


def sft_settings(folder: Path, **overrides: object) -> list[str]:
    """`key=value` of a job that takes one optimizer step per 8 conversations."""
    settings = {
        "model.path": folder / "model",
        "model.fsdp_config.dtype": "float32",
        "data.train_files": folder / "rows.jsonl",
        "data.train_batch_size": 8,
        "data.max_length": 32,
        "data.max_token_len_per_gpu": 64,
        "optim.lr": 3e-3,
        "trainer.default_local_dir": folder / "run",
        "trainer.logger": "[jsonl]",
        **overrides,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def start_run(rank: int, world_size: int, folder: Path, **overrides: object):
    """Build the trainer of this rank, whose process group exists already."""
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.sft import SFTTrainer

    config: SFTConfig = load_sft_config(
        None, sft_settings(folder, **{"trainer.n_gpus_per_node": world_size, **overrides})
    )
    session = Session(PhaseStatus(config.trainer.default_local_dir, rank))
    return SFTTrainer(config, session)


def save_checkpoint(run, step: int, score: float | None = None) -> None:
    """Start to save a checkpoint as a run does."""
    from hybridengine.train.checkpoint.pretrained import save_model_files

    run.checkpoints.save(
        step,
        score,
        lambda folder: save_model_files(
            run.model, run.tokenizer, folder, run.save_dtype, False, run.checkpoints.group
        ),
    )
