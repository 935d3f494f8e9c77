"""`dtype: auto`: resolved once, equal on all ranks, reported."""

import pytest
import torch

from hybridengine.model import Optimizer
from hybridengine.run.config import config_to_yaml, load_config, load_sft_config
from hybridengine.train import plan
from hybridengine.train.checkpoint import changed_settings
from hybridengine.train.checkpoint.folders import CONFIG, SavedCheckpoint
from hybridengine.train.plan import describe_precision, resolve_dtypes
from tests.ranks import run_ranks

REQUIRED = ["model.path=m", "data.train_files=f"]
GRPO = [*REQUIRED, "reward.custom_reward_function.path=r.py"]


@pytest.fixture(params=[True, False])
def fast(request, monkeypatch):
    monkeypatch.setattr(plan, "_fast_bfloat16", lambda: request.param)
    return request.param


def test_auto_is_the_default_and_becomes_a_type(fast):
    config, sft = load_config(None, GRPO), load_sft_config(None, REQUIRED)
    assert config.sharding.dtype == config.rollout.dtype == sft.sharding.dtype == "auto"
    expected = "bfloat16" if fast else "float32"
    config, sft = resolve_dtypes(config), resolve_dtypes(sft)
    assert config.sharding.dtype == config.rollout.dtype == sft.sharding.dtype == expected


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_engine_and_saved_weights_follow_the_compute_type(fast, dtype):
    config = resolve_dtypes(load_config(None, [*GRPO, f"actor.fsdp_config.dtype={dtype}"]))
    assert config.rollout.dtype == config.trainer.save_dtype == dtype
    sft = resolve_dtypes(load_sft_config(None, [*REQUIRED, f"model.fsdp_config.dtype={dtype}"]))
    assert sft.trainer.save_dtype == dtype


def test_a_given_type_stays(fast):
    types = ["rollout.dtype=bfloat16", "trainer.save_dtype=float32"]
    given = load_config(None, [*GRPO, "actor.fsdp_config.dtype=float16", *types])
    assert resolve_dtypes(given) == given
    half = resolve_dtypes(load_config(None, [*GRPO, "rollout.dtype=float16"]))
    assert half.rollout.dtype == "float16"
    assert half.sharding.dtype == ("bfloat16" if fast else "float32")


def test_resuming_in_another_type_is_reported(tmp_path, monkeypatch):
    config = load_config(None, GRPO)
    monkeypatch.setattr(plan, "_fast_bfloat16", lambda: True)
    (tmp_path / CONFIG).write_text(config_to_yaml(resolve_dtypes(config)))
    monkeypatch.setattr(plan, "_fast_bfloat16", lambda: False)
    assert changed_settings(SavedCheckpoint(1, tmp_path, None, {}), resolve_dtypes(config)) == [
        "actor.fsdp_config.dtype: bfloat16 → float32",
        "rollout.dtype: bfloat16 → float32",
        "trainer.save_dtype: bfloat16 → float32",
    ]


def resolved_on_unlike_machines(rank: int, world_size: int) -> str:
    plan._fast_bfloat16 = lambda: rank == 0
    return resolve_dtypes(load_sft_config(None, REQUIRED)).sharding.dtype


@pytest.mark.multirank
def test_all_ranks_take_what_is_fast_on_every_one():
    assert run_ranks(resolved_on_unlike_machines, 2) == ["float32", "float32"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the words are about a CPU")
def test_the_choice_is_reported(fast):
    chosen = "bfloat16" if fast else "float32"
    text = describe_precision(("trainer", chosen), ("engine", chosen))
    assert f"trainer {chosen}, engine {chosen}; this CPU has " in text
    assert ("no fast bfloat16" in text) == (not fast) and "slow" not in text
    assert ("dtype=auto takes float32" in describe_precision(("trainer", "bfloat16"))) == (not fast)


def test_a_loss_scale_belongs_to_its_type():
    def optimizer(dtype):
        return Optimizer(torch.nn.Linear(2, 2), lr=1.0, total_steps=6, param_dtype=dtype)

    half = optimizer(torch.float16)
    half.loss_scale = 8.0
    resumed = {}
    for dtype in (torch.float16, torch.float32):
        resumed[dtype] = optimizer(dtype)
        resumed[dtype].load_state_dict(half.state_dict())
    assert resumed[torch.float16].loss_scale == 8.0
    assert resumed[torch.float32].loss_scale == 1.0
