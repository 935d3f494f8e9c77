"""TRL's names: every key of the table exists, the page has the table, suggestions use it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hybridengine.keys.trl import TRL_NAMES
from hybridengine.run.config import (
    ConfigError,
    RLConfig,
    SFTConfig,
    keys_of,
    load_config,
    load_sft_config,
)

PAGE = Path(__file__).parents[3] / "docs" / "trl.md"
KINDS = {"grpo": (RLConfig, load_config), "sft": (SFTConfig, load_sft_config)}
OTHERS = {"model_name_or_path", "dataset_name", "reward_funcs"}  # scripts' and trainers' arguments


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_has_keys_and_is_suggested(kind: str) -> None:
    schema, load = KINDS[kind]
    keys = dict(keys_of(schema))
    for name, ours in TRL_NAMES[kind].items():
        assert set(ours) <= keys.keys()
        if name in keys:
            continue
        with pytest.raises(ConfigError) as caught:
            load(None, [f"{name}=1", "model.path=x", "data.train_files=x"])
        assert f"did you mean {' or '.join(ours)}?" in str(caught.value)


def test_names_are_of_trl() -> None:
    trl = pytest.importorskip("trl")
    for kind, theirs in (("grpo", trl.GRPOConfig), ("sft", trl.SFTConfig)):
        names = {field.name for field in dataclasses.fields(theirs)}
        old = {"max_prompt_length", "warmup_ratio", "vllm_importance_sampling_cap"}  # earlier ones
        assert TRL_NAMES[kind].keys() - OTHERS - old <= names


def test_the_page_has_the_table() -> None:
    keys = PAGE.read_text().partition("### Keys")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", keys, re.MULTILINE)
    grpo, sft = TRL_NAMES["grpo"], TRL_NAMES["sft"]
    expected = [
        (name, *(", ".join(f"`{key}`" for key in kind.get(name, ())) for kind in (grpo, sft)))
        for name in {**grpo, **sft}
    ]
    assert rows == expected
