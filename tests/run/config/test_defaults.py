"""Setting one key changes that key only, for every key of every kind of job."""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import reduce
from typing import Any

import pytest

from hybridengine.lab.keys import key_reference
from hybridengine.lab.simulate.config import SimulationConfig, load_simulation_config
from hybridengine.run.config import (
    RLConfig,
    SFTConfig,
    keys_of,
    load_config,
    load_job,
    load_sft_config,
)

NEEDED = ["model.path=model", "data.train_files=train.jsonl"]
# Values that the type does not determine; None: keys that need other keys too.
VALUES = {
    "rollout.servers": "[http://10.0.0.5:8000]",
    "rollout.quantization": "fp8",
    "actor.optim.name": "muon",
    "optim.name": "muon",
    "actor.optim.override_optimizer_config": None,
    "optim.override_optimizer_config": None,
    "actor.optim.betas": "[0.5,0.6]",
    "optim.betas": "[0.5,0.6]",
    "algorithm.rollout_correction.rollout_is_threshold": "3.0",
    "actor.ppo_mini_batch_size": "32",
    "actor.ppo_max_token_len_per_gpu": "20000",
    "algorithm.sampling_replay": "off",
    "data.max_prompt_length": "500",
    "data.max_response_length": "500",
    "rollout.max_model_len": "2000",
    "rollout.multi_turn.tool_config_path": None,
    "rollout.multi_turn.function_tool_path": None,
    "rollout.val_kwargs.do_sample": None,
    "rollout.val_kwargs.n": None,
    "trainer.mode": None,
    "rollout.in_flight_update": None,
    "trainer.resume_from_path": None,
    "model.lora_adapter_path": None,
    "algorithm.rollout_correction.loss_type": None,
    "reshard.lora": None,
    "layout.critic_ranks": None,
    "workload.response_lengths": "[2]",
    "algorithm.gdpo_reward_weights": None,
    "algorithm.distill.teacher_path": None,
    "model.share_expert_adapters": None,
    "reward.custom_reward_function.name": None,
    "reward.reward_model.enable": None,
    "reward.reward_model.model_path": None,
    "algorithm.rollout_correction.rollout_rs": None,
    "algorithm.rollout_correction.rollout_rs_threshold": None,
}
DIVISORS = (
    *("tensor_model_parallel_size", "fsdp_size", "ulysses_sequence_parallel_size"),
    "expert_parallel_size",
)
KINDS: dict[str, tuple[type, Any]] = {
    "grpo": (RLConfig, lambda overrides: load_config(None, overrides)),
    "ppo": (RLConfig, lambda overrides: load_job("ppo", None, overrides)),
    "sft": (SFTConfig, lambda overrides: load_sft_config(None, overrides)),
    "simulate": (
        SimulationConfig,
        lambda given: load_simulation_config(None, [o for o in given if "train_files" not in o]),
    ),
}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return found


def other_value(key: str, type_: str, default: Any) -> str | None:
    """Return a valid value that is not the default; None where it needs other keys."""
    if key in VALUES:
        return VALUES[key]
    if key.endswith(DIVISORS):
        return "1" if default != 1 else None
    choices = type_.split(" or ")[0]
    if " | " in choices:
        texts = [c for c in choices.removeprefix("list of ").split(" | ") if c != default]
        return texts[0]
    if choices in ("list of float", "list of int"):
        return "[2.0]" if choices.endswith("float") else "[2]"
    if isinstance(default, bool) or choices == "bool":
        return str(not default).lower()
    if isinstance(default, int):
        return str(default + 1)
    if isinstance(default, float):
        return str(default / 2 or 0.25)
    if isinstance(default, dict):
        return "{some: 1}"
    if default is None and choices.startswith(("int", "float")):
        return "3" if choices.startswith("int") else "0.5"
    return "something"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_setting_one_key_changes_that_key_only(kind):
    schema, load = KINDS[kind]
    unset = load(NEEDED)
    before, types = flat(asdict(unset)), {key.name: key.type for key in key_reference(kind)}
    tried = 0
    for key, _ in keys_of(schema):
        value = other_value(key, types[key], reduce(getattr, key.split("."), unset))
        if value is None:
            continue
        given = [o for o in NEEDED if not o.startswith(f"{key}=")]
        after = flat(asdict(load([*given, f"{key}={value}"])))
        changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
        assert changed - {key, f"{key}.some"} == set(), key
        assert changed, key
        tried += 1
    assert tried > len(list(keys_of(schema))) - len(VALUES)


@pytest.mark.parametrize("schema", [RLConfig, SFTConfig, SimulationConfig])
def test_a_group_is_its_class_without_arguments(schema):
    """Otherwise setting one key would reset the other defaults of its group."""

    def check(section: Any, name: str) -> None:
        assert section == type(section)(), name
        for f in fields(section):
            if is_dataclass(getattr(section, f.name)):
                check(getattr(section, f.name), f"{name}.{f.name}")

    check(schema(), schema.__name__)


def test_defaults_of_derived_groups_are_kept():
    sft = load_sft_config(None, [*NEEDED, "optim.weight_decay=0.1"])
    assert sft.optim.lr == load_sft_config(None, NEEDED).optim.lr == 1e-5
    grpo = load_config(None, [*NEEDED, "critic.optim.lr_warmup_steps=10"])
    assert grpo.critic.optim.lr == 1e-5
    two = load_config(None, [*NEEDED, "trainer.n_gpus_per_node=2"])
    assert two.trainer.default_local_dir == "runs/grpo"
    assert two.trainer.experiment_name == "grpo"


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_type_a_default_and_a_meaning(kind):
    for key in key_reference(kind):
        assert key.type and key.default and key.meaning, key
