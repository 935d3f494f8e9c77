"""`dtype: auto`: resolved once, equal on all ranks, reported."""

import pytest
import torch

from hybridengine.model import Optimizer
from hybridengine.run.config import config_to_yaml, load_config, load_sft_config
from hybridengine.train.checkpoint import changed_settings
from hybridengine.train.checkpoint.folders import CONFIG, SavedCheckpoint
from hybridengine.train.choices import Machine, describe_precision, resolve_dtypes

REQUIRED = ["model.path=m", "data.train_files=f"]
GRPO = [*REQUIRED, "reward.custom_reward_function.path=r.py"]


SLOW, FAST = (Machine(0, fast_bfloat16=fast, has_vllm=False) for fast in (False, True))

machines = pytest.mark.parametrize("machine", [SLOW, FAST])


@machines
def test_auto_is_the_default_and_becomes_a_type(machine):
    config, sft = load_config(None, GRPO), load_sft_config(None, REQUIRED)
    assert config.sharding.dtype == config.rollout.dtype == sft.sharding.dtype == "auto"
    expected = "bfloat16" if machine is FAST else "float32"
    config, sft = resolve_dtypes(config, machine), resolve_dtypes(sft, machine)
    assert config.sharding.dtype == config.rollout.dtype == sft.sharding.dtype == expected


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@machines
def test_engine_and_saved_weights_follow_the_compute_type(machine, dtype):
    given = [*GRPO, f"actor.fsdp_config.dtype={dtype}"]
    config = resolve_dtypes(load_config(None, given), machine)
    assert config.rollout.dtype == config.trainer.save_dtype == dtype
    given = [*REQUIRED, f"model.fsdp_config.dtype={dtype}"]
    sft = resolve_dtypes(load_sft_config(None, given), machine)
    assert sft.trainer.save_dtype == dtype


@machines
def test_a_given_type_stays(machine):
    types = ["rollout.dtype=bfloat16", "trainer.save_dtype=float32"]
    given = load_config(None, [*GRPO, "actor.fsdp_config.dtype=float16", *types])
    assert resolve_dtypes(given, machine) == given
    half = resolve_dtypes(load_config(None, [*GRPO, "rollout.dtype=float16"]), machine)
    assert half.rollout.dtype == "float16"
    assert half.sharding.dtype == ("bfloat16" if machine is FAST else "float32")


def test_resuming_in_another_type_is_reported(tmp_path):
    config = load_config(None, GRPO)
    (tmp_path / CONFIG).write_text(config_to_yaml(resolve_dtypes(config, FAST)))
    resumed = SavedCheckpoint(1, tmp_path, None, {})
    assert changed_settings(resumed, resolve_dtypes(config, SLOW)) == [
        "actor.fsdp_config.dtype: bfloat16 → float32",
        "rollout.dtype: bfloat16 → float32",
        "trainer.save_dtype: bfloat16 → float32",
    ]


@machines
def test_the_choice_is_reported(machine):
    chosen = "bfloat16" if machine is FAST else "float32"
    text = describe_precision({"trainer": chosen, "engine": chosen}, machine)
    assert f"trainer {chosen}, engine {chosen}; this CPU has " in text
    assert ("no fast bfloat16" in text) == (machine is SLOW) and "slow" not in text
    forced = describe_precision({"trainer": "bfloat16"}, machine)
    assert ("dtype=auto takes float32" in forced) == (machine is SLOW)


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
