"""examples/sft: every key is one of ours, and the recipes run, at tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.train.sft_job import write_sft_job

EXAMPLES = Path(__file__).parents[2] / "examples" / "sft"

pytestmark = pytest.mark.multirank


def train(rank: int, world_size: int, example: Path, overrides: list[str]) -> None:
    from hybridengine.run.config import load_sft_config
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.sft import SFTTrainer

    config = load_sft_config(example, overrides)
    status = PhaseStatus(config.trainer.default_local_dir, rank)
    SFTTrainer(config, Session(status)).train()


@pytest.mark.parametrize("name", ["full", "lora"])
def test_recipe(tmp_path: Path, name: str) -> None:
    job = write_sft_job(tmp_path)
    rows = [json.loads(line) for line in (job / "rows.jsonl").read_text().splitlines()]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, job / "rows.parquet")
    overrides = [
        f"model.path={job / 'model'}",
        f"data.train_files={job / 'rows.parquet'}",
        f"data.val_files={job / 'rows.parquet'}",
        "data.train_batch_size=8",
        "optim.lr=3e-3",
        "optim.lr_warmup_steps_ratio=0",
        "optim.lr_warmup_steps=0",
        "trainer.save_freq=2",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.n_gpus_per_node=2",
    ]
    run_ranks(train, 2, EXAMPLES / f"{name}.yaml", overrides)
    run = tmp_path / "run"
    losses = [
        row["val/loss"]
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "val/loss" in row
    ]
    assert losses[-1] < losses[0]
    assert (
        len(list(run.glob("global_step_*"))) == {"full": 2, "lora": 3}[name]
    )  # the best is the last
    assert list((run / "tensorboard").glob("events*"))
    assert (run / "final_adapter").is_dir() == (name == "lora")
    if name == "lora":
        names = load_file(run / "final_adapter" / "adapter_model.safetensors")
        assert all("lora_" in key for key in names)
