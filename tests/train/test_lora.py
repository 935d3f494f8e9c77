"""GRPO on adapters: rollouts follow them, the reference is the base, the base stays as it was."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.train.toy import toy_job

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


@pytest.mark.exhaustive
def test_adapters_learn_beside_a_frozen_base(tmp_path: Path) -> None:
    command = toy_job(
        tmp_path,
        **{
            "model.lora_rank": 4,
            "model.lora_alpha": 8,
            "model.target_modules": "[q_proj,v_proj,down_proj]",
            "model.enable_gradient_checkpointing": True,
            "reshard.lora": "adapters",
            "actor.use_kl_loss": True,
            "actor.optim.lr": 2e-2,
            "rollout.name": "vllm",
            "rollout.tensor_model_parallel_size": 2,
            "trainer.total_training_steps": 8,
        },
    )
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "critic/score/mean" in row]
    assert steps[-1]["critic/score/mean"] > steps[0]["critic/score/mean"] + 0.05
    # bf16 in both; a stale adapter shows as a difference that grows with the steps
    assert max(row["training/rollout_probs_diff_mean"] for row in steps) < 0.01
    assert steps[0]["actor/kl_loss"] < 1e-6 < 1e-3 < steps[-1]["actor/kl_loss"]
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.bfloat16).state_dict()
        for folder in ("model", "run/final")
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "down_proj"}
