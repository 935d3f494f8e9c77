"""Checkpoints and exports of a run with a vision tower, which is trained or frozen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridengine.checkpoint.export import export_checkpoint
from tests.ranks import run_ranks
from tests.trainer.sft_job import save_checkpoint, start_run
from tests.vision.tiny_vision import count_rows, save_tiny_vision

pytestmark = pytest.mark.multirank


def save_body(rank: int, world_size: int, folder: Path, frozen: bool) -> list[float]:
    """Two steps with a checkpoint between them; return the loss of the second."""
    run = start_run(rank, world_size, folder, **settings(frozen))
    run.step(1)
    save_checkpoint(run, 1)
    run.checkpoints.wait()
    return run.step(2)[0]["train/loss"]


def resume_body(rank: int, world_size: int, folder: Path, frozen: bool) -> list[float]:
    run = start_run(rank, world_size, folder, **settings(frozen))
    assert run.checkpoints.resume("auto").step == 1
    return run.step(2)[0]["train/loss"]


def settings(frozen: bool) -> dict[str, object]:
    return {
        "data.messages_key": "messages",
        "data.max_length": 64,
        "data.max_token_len_per_gpu": 256,
        "model.freeze_vision_tower": frozen,
    }


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return dict(model.named_parameters())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_is_resumed_and_exported_with_its_tower(tmp_path: Path, frozen: bool) -> None:
    save_tiny_vision("qwen2_vl", tmp_path / "model")
    conversations = [
        {
            "messages": [
                *row["prompt"],
                {"role": "assistant", "content": row["reward_model"]["ground_truth"]},
            ],
            "images": row["images"],
        }
        for row in count_rows(tmp_path, 12, 4)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, conversations)))
    losses = run_ranks(save_body, 2, tmp_path, frozen)
    assert run_ranks(resume_body, 2, tmp_path, frozen) == losses
    export_checkpoint(tmp_path / "run", tmp_path / "out", torch.float32)
    start, trained = parameters(tmp_path / "model"), parameters(tmp_path / "out")
    assert start.keys() == trained.keys()
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert any("language_model" in name for name in changed)
    assert any("visual" in name for name in changed) != frozen
    processor = "preprocessor_config.json"
    assert (tmp_path / "out" / processor).read_text() == (
        tmp_path / "model" / processor
    ).read_text()
