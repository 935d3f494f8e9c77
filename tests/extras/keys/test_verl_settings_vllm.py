"""An initial adapter and max_position_embeddings reach vLLM."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.model.lora_shared import write_adapter
from tests.train.toy import toy_job

pytestmark = [pytest.mark.multirank, pytest.mark.exhaustive]
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


@pytest.mark.parametrize("lora", ["merged", "adapters"])
def test_the_engine_gets_adapter_and_positions(tmp_path: Path, lora: str) -> None:
    """vLLM refuses a max_model_len beyond its own max_position_embeddings."""
    command = toy_job(
        tmp_path,
        **{
            "model.lora_adapter_path": tmp_path / "adapter",
            "model.override_config.max_position_embeddings": 4096,
            "rollout.max_model_len": 3000,
            "rollout.name": "vllm",
            "reshard.lora": lora,
            "actor.use_kl_loss": True,
            "trainer.total_training_steps": 2,
        },
    )
    write_adapter(str(tmp_path / "model"), tmp_path / "adapter")
    assert (
        json.loads((tmp_path / "model/config.json").read_text())["max_position_embeddings"] < 3000
    )
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "critic/score/mean" in row]
    assert max(row["training/rollout_probs_diff_mean"] for row in steps) < 0.01
    assert steps[0]["actor/kl_loss"] > 1e-6  # the reference is the model without the adapter
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096
