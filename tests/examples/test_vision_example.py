"""examples/vision: its data and configurations run, at a smaller size."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.train.in_process import run_jobs

EXAMPLE = Path(__file__).parents[2] / "examples" / "vision"

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


def _sft(rank: int, world_size: int, overrides: list[str]) -> None:
    from hybridengine.run.config import load_sft_config
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.preflight import check_job
    from hybridengine.train.sft import SFTTrainer

    config = load_sft_config(EXAMPLE / "sft.yaml", overrides)
    check_job(config)
    SFTTrainer(config, Session(PhaseStatus(config.trainer.default_local_dir, rank))).train()


def test_sft_then_grpo_from_its_final_folder(tmp_path: Path) -> None:
    """The folder that SFT leaves has the image processor that GRPO needs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    prepare = runpy.run_path(str(EXAMPLE / "prepare.py"))
    prepare["save_model"](tmp_path / "model")
    for name in ("train", "test"):
        rows = prepare["rows"](number=16, seed=1)
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    data = [f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/test.parquet"]
    data += ["data.train_batch_size=8"]
    model = [f"model.path={tmp_path}/model", f"trainer.default_local_dir={tmp_path}/sft"]
    run_ranks(_sft, 1, [*data, *model, "trainer.total_training_steps=2"])
    grpo = [
        *data,
        f"model.path={tmp_path}/sft/final",
        f"reward.custom_reward_function.path={EXAMPLE}/reward.py",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.total_training_steps=2",
        "rollout.name=hf",
    ]
    [result] = run_jobs(tmp_path, [[str(EXAMPLE / "grpo.yaml"), *grpo]])
    assert not result.refused and len(result.rows) >= 2
    assert len(result.rollouts["step_1"][0]["images"]) == 1
