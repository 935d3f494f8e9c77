"""Jobs that divide the experts of a mixture over ranks, or train adapters of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridengine.lab.export import export_checkpoint
from tests.train.in_process import lines_of, moe_job, run_jobs

DIVIDED = "actor.fsdp_config.expert_parallel_size=2"
ADAPTED = ("model.lora_rank=4", "model.target_parameters=[experts.gate_up_proj,experts.down_proj]")


@pytest.mark.multirank
def test_divided_experts_train_as_others(tmp_path: Path) -> None:
    """Replayed routes, recomputed layers, a reference, two updates, the sync of every step."""
    base = [
        *moe_job(tmp_path),
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "actor.optim.lr=1e-4",
        "actor.ppo_epochs=2",
        "actor.use_kl_loss=true",
        "actor.router_replay=old",
        "model.enable_gradient_checkpointing=true",
    ]
    base = [f"{k}={v}" for k, v in dict(o.split("=", 1) for o in base).items()]
    plain, divided = run_jobs(tmp_path, [base, [*base, DIVIDED]], 2)
    assert not plain.refused and not divided.refused
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/kl_loss"):
        for expected, got in zip(plain.rows, divided.rows, strict=True):
            if name in expected:
                assert got[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5)
    assert divided.last["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.multirank
def test_adapters_of_experts_reach_engine_and_export(tmp_path: Path) -> None:
    """The second job of each kind goes on where the first one has stopped."""
    base = [*moe_job(tmp_path), *ADAPTED, "trainer.n_gpus_per_node=2", "trainer.save_freq=1"]
    jobs = []
    for shared in ("none", "outer"):
        settings = {
            "trainer.resume_mode": "auto",
            "trainer.default_local_dir": tmp_path / shared,
            "model.share_expert_adapters": shared,
        }
        for steps in (1, 2):
            more = settings | {"trainer.total_training_steps": steps}
            pairs = dict(o.split("=", 1) for o in base) | more
            jobs.append([f"{key}={value}" for key, value in pairs.items()])
    assert [result.refused for result in run_jobs(tmp_path, jobs, 2)] == [""] * 4
    for shared in ("none", "outer"):
        check_adapted(tmp_path, shared)


def check_adapted(folder: Path, run: str) -> None:
    rows = [row for row in lines_of(folder / run / "metrics.jsonl") if "actor/pg_loss" in row]
    assert len(rows) == 2 and all(row["actor/grad_norm"] > 0 for row in rows)
    assert rows[1]["training/rollout_probs_diff_max"] < 1e-4, "the engine has the same experts"
    export_checkpoint(folder / run, folder / "merged" / run, torch.float32)
    merged = load_file(folder / "merged" / run / "model.safetensors")
    base = load_file(folder / "moe" / "model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert any(".experts." in name for name in changed)
    assert all(".experts." in name or "self_attn" in name for name in changed)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*ADAPTED, "reshard.lora=adapters"], "those of experts .* are not sent apart"),
        ([*ADAPTED, "actor.fsdp_config.wrap_policy.min_num_params=9"], "read in the FSDP group"),
        (
            [DIVIDED, *ADAPTED, "trainer.n_gpus_per_node=2"],
            "model.target_parameters = .* not allow",
        ),
        ([DIVIDED, "trainer.n_gpus_per_node=3"], "does not divide the 3 ranks"),
        ([DIVIDED, "trainer.n_gpus_per_node=2", "model.compile=true"], "model.compile = True"),
        (
            [DIVIDED, "trainer.n_gpus_per_node=4", "actor.fsdp_config.fsdp_size=2"],
            "fsdp_size = 2 does not allow; leave it -1",
        ),
    ],
)
def test_refused_combinations(overrides: list[str], words: str) -> None:
    from hybridengine.run.config import ConfigError, load_config

    with pytest.raises(ConfigError, match=words):
        load_config(None, ["model.path=m", "data.train_files=t.jsonl", *overrides])
