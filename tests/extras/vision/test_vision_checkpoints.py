"""Checkpoints and exports of a run with a vision tower, which is trained or frozen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridengine.lab.export import export_checkpoint
from tests.extras.vision.tiny_vision import count_rows, save_tiny_vision
from tests.ranks import run_ranks
from tests.train.sft_job import save_checkpoint, start_run

pytestmark = pytest.mark.multirank


def save_body(rank: int, world_size: int, folder: Path) -> list[float]:
    """Two steps with a checkpoint between them; return the losses of the second."""
    losses = []
    for frozen in (False, True):
        run = start_run(rank, world_size, folder, **settings(folder, frozen))
        run.step(1)
        save_checkpoint(run, 1)
        run.checkpoints.wait()
        losses.append(run.step(2)[0]["train/loss"])
    return losses


def resume_body(rank: int, world_size: int, folder: Path) -> list[float]:
    losses = []
    for frozen in (False, True):
        run = start_run(rank, world_size, folder, **settings(folder, frozen))
        assert run.checkpoints.resume("auto").step == 1
        losses.append(run.step(2)[0]["train/loss"])
    return losses


def settings(folder: Path, frozen: bool) -> dict[str, object]:
    return {
        "trainer.default_local_dir": folder / f"frozen={frozen}",
        "data.messages_key": "messages",
        "data.max_length": 128,
        "data.max_token_len_per_gpu": 256,
        "model.keep_vision_tower": True,
        "model.freeze_vision_tower": frozen,
    }


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    "kind",
    [
        "qwen2_vl",
        *(
            pytest.param(kind, marks=pytest.mark.exhaustive)
            for kind in ("qwen3_5", "mistral3", "gemma4", "glm4v")
        ),
    ],
)
def test_a_run_is_resumed_and_exported_with_its_tower(tmp_path: Path, kind: str) -> None:
    save_tiny_vision(kind, tmp_path / "model")
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
    losses = run_ranks(save_body, 2, tmp_path)
    assert run_ranks(resume_body, 2, tmp_path) == losses
    start = parameters(tmp_path / "model")
    for frozen in (False, True):
        out = tmp_path / f"out {frozen}"
        export_checkpoint(tmp_path / f"frozen={frozen}", out, torch.float32)
        trained = parameters(out)
        assert start.keys() == trained.keys()
        changed = {name for name in start if not torch.equal(start[name], trained[name])}
        assert any("language_model" in name for name in changed)
        tower = {name for name in start if "visual" in name or "vision_tower" in name}
        assert tower and bool(tower & changed) != frozen
        processor = "preprocessor_config.json"
        expected = (tmp_path / "model" / processor).read_text()
        assert (out / processor).read_text() == expected
