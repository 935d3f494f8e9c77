"""Settings of verl's commands in real runs on two ranks: bypass_mode, adapters, positions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model.lora_shared import write_adapter
from tests.train.in_process import run_jobs, small_job

pytestmark = pytest.mark.multirank
CORRECTION = "algorithm.rollout_correction"
BYPASS = ("rollout.dtype=bfloat16", f"{CORRECTION}.bypass_mode=true")
NORMALIZED = f"{CORRECTION}.rollout_is_batch_normalize=true"
KL = ("actor.use_kl_loss=true", "trainer.total_training_steps=1")


def test_settings_of_verl_in_runs(tmp_path: Path) -> None:
    base = [*small_job(tmp_path), "trainer.n_gpus_per_node=2"]
    write_adapter(str(tmp_path / "model"), tmp_path / "adapter")
    positions = "model.override_config.max_position_embeddings"
    jobs = [
        (*BYPASS, "actor.ppo_epochs=2"),
        (
            *BYPASS,
            f"{CORRECTION}.loss_type=reinforce",
            f"{CORRECTION}.rollout_is=sequence",
            NORMALIZED,
            "actor.ppo_mini_batch_size=2",
            "actor.optim.lr=1e-9",
        ),
        ("rollout.dtype=bfloat16", NORMALIZED),
        (f"model.lora_adapter_path={tmp_path / 'adapter'}", *KL),
        ("model.lora_rank=3", *KL),
        (f"{positions}=3",),
        (f"{positions}=99",),
    ]
    results = run_jobs(tmp_path, [[*base, *job] for job in jobs], world_size=2)
    ppo, reinforce, decoupled, adapted, zero, short, longer = results
    for result in (ppo, reinforce, decoupled, adapted, zero, longer):
        assert not result.refused
    for result in (ppo, reinforce, decoupled):
        assert result.last["rollout_corr/k3_kl"] > 0
    for result in (reinforce, decoupled):
        assert result.last["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1, 0.02)
    # The engine follows the adapter, and the reference is the model without it.
    assert adapted.last["training/rollout_probs_diff_mean"] < 1e-4
    assert zero.last["actor/kl_loss"] < 1e-8 < adapted.last["actor/kl_loss"]
    assert "max_position_embeddings" in short.refused
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert config["max_position_embeddings"] == 99
