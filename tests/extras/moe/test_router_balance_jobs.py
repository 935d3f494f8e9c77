"""Balance of experts in jobs: the keys, their metrics, and the bias in engine and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridengine.moe.router_balance import BIASES
from tests.extras.moe.moe_models import ARCHITECTURES, tiny_moe
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.train.in_process import run_jobs, small_job
from tests.train.sft_job import start_run, write_sft_job

pytestmark = pytest.mark.multirank

LOAD = {"moe/load_max_violation/mean", "moe/load_max_violation/max", "moe/dead_experts"}


def moe_job(folder: Path, kind: str) -> list[str]:
    """A job on a mixture of `kind`, with the tokenizer of the tiny models."""
    folder.mkdir(exist_ok=True)
    base, path = small_job(folder), folder / "moe"
    save_tiny("qwen3_moe", path)
    if kind != "qwen3_moe":
        for file in path.glob("*.safetensors"):
            file.unlink()
        ids = {"bos_token_id": 1, "eos_token_id": 2}
        tiny_moe(kind, **ARCHITECTURES[kind] | ids).save_pretrained(path)
    return [*base, f"model.path={path}"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: x for file in folder.glob("*.safetensors") for n, x in load_file(file).items()}


def of_load(row: dict[str, Any]) -> set[str]:
    return {name for name in row if name.startswith("moe/")}


def test_losses_of_an_rl_job(tmp_path: Path) -> None:
    base = [*moe_job(tmp_path, "qwen3_moe"), "actor.ppo_epochs=2"]
    aux, z = "actor.router_aux_loss_coef=0.5", "actor.router_z_loss_coef=0.1"
    jobs = [base, [*base, aux], [*base, z], [*base, aux, "actor.router_replay=old"]]
    off, with_aux, with_z, replayed = run_jobs(tmp_path, jobs)
    assert of_load(off.last) == LOAD
    for result in (with_aux, with_z, replayed):
        assert not result.refused
        assert of_load(result.last) == LOAD | {"moe/aux_loss", "moe/z_loss"}
        assert result.last["actor/grad_norm"] != off.last["actor/grad_norm"]
    assert with_aux.last["actor/grad_norm"] != with_z.last["actor/grad_norm"]
    assert with_aux.last["moe/aux_loss"] >= 1.9, "2 experts of a token: 2 where the load is even"


@pytest.mark.parametrize(
    "kind", ["glm4_moe", pytest.param("ernie4_5_moe", marks=pytest.mark.exhaustive)]
)
def test_the_bias_reaches_the_engine_and_the_files(tmp_path: Path, kind: str) -> None:
    """Later steps' responses are sampled with a bias that routes other experts.

    Nothing else is trained, so the engine's probabilities equal the trainer's only with it.
    """
    base = [*moe_job(tmp_path, kind), "actor.optim.lr=1e-12", "trainer.total_training_steps=3"]
    still, moved = run_jobs(tmp_path, [base, [*base, "actor.router_bias_update_rate=0.3"]])
    assert not still.refused and not moved.refused
    second = [run.rollouts["step_2"] for run in (still, moved)]
    assert second[0] != second[1], "the bias changes the routes"
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in moved.rows)
    saved = weights_of(tmp_path / "run" / "final")
    biases = [x for n, x in saved.items() if BIASES[0] in n]
    assert biases and all(0.25 < float(x.abs().max()) < 0.95 for x in biases), (
        "three updates of 0.3"
    )
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")


def test_frozen_routers_stay_as_they_are(tmp_path: Path) -> None:
    base = [*moe_job(tmp_path, "qwen3_moe"), "actor.freeze_moe_router=true"]
    [result] = run_jobs(tmp_path, [base])
    assert not result.refused
    before, after = (weights_of(tmp_path / name) for name in ("moe", "run/final"))
    same = {name for name, x in before.items() if torch.equal(x, after[name])}
    assert same == {name for name in before if name.endswith("mlp.gate.weight")} != set()


def test_an_sft_job(tmp_path: Path) -> None:
    """Two ranks against one: load and loss are global."""
    write_sft_job(tmp_path)
    moe_job(tmp_path / "of", "glm4_moe")
    coefs = {"model.router_aux_loss_coef": 0.5, "model.router_bias_update_rate": 0.1}
    balanced = coefs | {"data.max_token_len_per_gpu": 512}
    [(off, one)] = run_ranks(sft_body, 1, tmp_path, [{}, balanced])
    two = [row for (row,) in run_ranks(sft_body, 2, tmp_path, [balanced])]
    assert of_load(off) == LOAD and of_load(one) == LOAD | {"moe/aux_loss", "moe/z_loss"}
    assert one["train/grad_norm"] != off["train/grad_norm"]
    for row in two:
        assert row == pytest.approx(one, rel=1e-4), "one micro-batch of each rank per step"


def sft_body(
    rank: int, world_size: int, folder: Path, jobs: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The metrics of the first steps of SFT jobs."""
    model = {"model.path": folder / "of" / "moe"}
    return [start_run(rank, world_size, folder, **model, **job).step(1)[0] for job in jobs]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor.router_bias_update_rate=0.1", "model.lora_rank=2"], "only adapters change"),
        (["actor.freeze_moe_router=true", "model.lora_rank=2"], "only adapters change"),
        (["actor.router_aux_loss_coef=-1"], "greater than or equal to 0"),
    ],
)
def test_refused_combinations(overrides: list[str], words: str) -> None:
    from hybridengine.run.config import ConfigError, load_config

    with pytest.raises(ConfigError, match=words):
        load_config(None, ["model.path=m", "data.train_files=t.jsonl", *overrides])


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    keys = ("router_aux_loss_coef=1.0", "router_bias_update_rate=0.1", "freeze_moe_router=true")
    base = small_job(tmp_path)
    results = run_jobs(tmp_path, [[*base, f"actor.{key}"] for key in keys])
    for result in results:
        assert "LlamaForCausalLM has no module `experts`" in result.refused
