"""SFT with images: a tiny model learns to count squares on images that it has not seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.extras.vision.tiny_vision import count_rows, save_tiny_vision
from tests.ranks import run_ranks

NUM_ROWS, NUM_HELD_OUT = 256, 32
CHANCE = 1.386  # -log of a quarter: one of four counts


def _sft(
    rank: int, world_size: int, folder: Path, overrides: dict[str, object]
) -> list[dict[str, float]]:
    from hybridengine.run.config import load_sft_config
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.preflight import check_job
    from hybridengine.train.sft import SFTTrainer

    settings = {
        "model.path": folder / "model",
        "model.fsdp_config.dtype": "float32",
        "data.train_files": folder / "train.jsonl",
        "data.val_files": folder / "val.jsonl",
        "data.messages_key": "messages",
        "data.train_batch_size": 32,
        "data.max_length": 64,
        "data.max_token_len_per_gpu": 2048,
        "optim.lr": 2e-3,
        "trainer.n_gpus_per_node": world_size,
        "trainer.default_local_dir": folder / "run",
        "trainer.logger": "[jsonl]",
        **overrides,
    }
    config = load_sft_config(None, [f"{key}={value}" for key, value in settings.items()])
    check_job(config)
    SFTTrainer(config, Session(PhaseStatus(folder / "run", rank))).train()
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def _write(folder: Path, num_texts: int) -> None:
    save_tiny_vision("qwen2_vl", folder / "model")
    rows = count_rows(folder, NUM_ROWS + NUM_HELD_OUT, num_texts)
    conversations = [
        {
            "messages": [
                *row["prompt"],
                {"role": "assistant", "content": row["reward_model"]["ground_truth"]},
            ],
            "images": row["images"],
        }
        for row in rows
    ]
    held_out = conversations[NUM_ROWS : NUM_ROWS + NUM_HELD_OUT]
    trained = conversations[:NUM_ROWS] + conversations[NUM_ROWS + NUM_HELD_OUT :]
    for name, part in (("train", trained), ("val", held_out)):
        lines = [json.dumps(row) for row in part]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


@pytest.mark.slow
@pytest.mark.multirank
def test_counting_squares_is_learnt(tmp_path: Path) -> None:
    """Conversations of text alone are in the same batches."""
    _write(tmp_path, num_texts=32)
    overrides = {"trainer.total_epochs": 4, "trainer.test_freq": 18}
    rows = run_ranks(_sft, 1, tmp_path, overrides)[0]
    losses = [row["val/loss"] for row in rows if "val/loss" in row]
    assert losses[-1] < 0.25 * CHANCE
