"""What a run computes with is decided once: alike on all ranks, written into the run's folder."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridengine.run.config import ConfigError, load_config
from hybridengine.train.choices import Choices, Machine, decide
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.train.in_process import small_job

MACHINE = Machine(0, fast_bfloat16=True, has_vllm=True)
AUTO = ("rollout.name=auto", "actor.fsdp_config.dtype=auto", "rollout.dtype=auto")


def agreed(
    rank: int, world_size: int, job: list[str], machines: list[Machine], folder: Path
) -> dict[str, Any]:
    """Agree as a rank on a machine of its own; return what is written, or the error."""
    from unittest.mock import patch

    from hybridengine.train import choices

    job = [setting.replace("RANK", str(rank)) for setting in job]
    with patch.object(Machine, "here", lambda: machines[rank]):
        try:
            config, chosen = choices.agree(load_config(None, job))
        except ConfigError as error:
            return {"error": str(error)}
    assert config.rollout.dtype == chosen.dtypes["engine"]
    (folder / str(rank)).mkdir(exist_ok=True)
    chosen.write(folder / str(rank))
    return dict(json.loads((folder / str(rank) / "choices.json").read_text()))


def same(folder: Path, job: list[str], *machines: Machine) -> dict[str, Any]:
    first, *others = run_ranks(agreed, len(machines), job, list(machines), folder)
    assert all(other == first for other in others)
    return dict(first)


@pytest.mark.multirank
def test_ranks_of_unlike_machines_fall_back_together(tmp_path: Path) -> None:
    job = [*small_job(tmp_path), *AUTO, "model.share_engine_weights=auto"]
    lacking = {
        "exact": "rms_norm has no C++ kernel here",
        "prefix": "tree_attention has no kernel",
        "shares": "torch is 2.12",
    }
    other = replace(MACHINE, fast_bfloat16=False, obstacles=lacking)
    alike = same(tmp_path, job, MACHINE, MACHINE)
    assert alike["dtypes"]["choice"] == dict.fromkeys(
        ("trainer", "engine", "saved weights"), "bfloat16"
    )
    assert all(alike[name]["choice"] for name in ("exact", "prefix", "shares"))
    unlike = same(tmp_path, job, MACHINE, other)
    assert set(unlike["dtypes"]["choice"].values()) == {"float32"}
    for name, reason in lacking.items():
        assert unlike[name] == {"choice": False, "reason": f"rank 1: {reason}"}
    everywhere = same(tmp_path, job, other, other)
    assert everywhere["exact"]["reason"] == lacking["exact"]


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        (
            name,
            replace(MACHINE, has_vllm=False),
            f"rollout.name is {name}, and vllm is not installed on rank 1, but is installed on "
            "rank 0; install",
        )
        for name in ("auto", "vllm")
    ]
    + [("hf", replace(MACHINE, gpu_bytes=1 << 30), "rank 1 has a GPU, and rank 0 no GPU; run all")],
)
def test_machines_that_do_not_fit_together(
    tmp_path: Path, name: str, other: Machine, message: str
) -> None:
    job = [*small_job(tmp_path), f"rollout.name={name}"]
    assert same(tmp_path, job, MACHINE, other)["error"].startswith(message)


@pytest.mark.multirank
def test_what_one_rank_rules_out_is_refused_on_every_rank(tmp_path: Path) -> None:
    job = [*small_job(tmp_path), *AUTO, "rollout.exact=on", "actor.shared_prefix=on"]
    lacking = {"exact": "rms_norm has no C++ kernel here", "prefix": "no kernel for this GPU"}
    error = same(tmp_path, job, MACHINE, replace(MACHINE, obstacles=lacking))["error"]
    for key, name in (("rollout.exact", "exact"), ("actor.shared_prefix", "prefix")):
        assert re.search(rf"{key} is on, but rank 1: {re.escape(lacking[name])}; set", error)


@pytest.mark.multirank
def test_another_model_on_one_rank(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    for rank, kind in enumerate(("llama", "qwen3")):
        save_tiny(kind, tmp_path / f"model{rank}")
    job = [*job, f"model.path={tmp_path}/modelRANK"]
    first, second = (x["error"] for x in run_ranks(agreed, 2, job, [MACHINE] * 2, tmp_path))
    for error in (first, second):
        assert re.search(
            r"model.path '.*' is another model on rank 1, whose \w+ is .*, than", error
        )


def chosen(tmp_path: Path, *overrides: str) -> Choices:
    return decide(load_config(None, [*small_job(tmp_path), *overrides]), machine=MACHINE)


@pytest.mark.parametrize(
    ("overrides", "mode", "reason"),
    [
        (("reshard.delta=off",), "off", "reshard.delta is off"),
        (("reshard.delta=on",), "off", "rollout.dtype is float32"),
        (("reshard.delta=on", "rollout.dtype=bfloat16"), "on", "reshard.delta is on"),
        (("rollout.dtype=bfloat16",), "auto", "over a link sends only what changed"),
    ],
)
def test_delta(tmp_path: Path, overrides: tuple[str, ...], mode: str, reason: str) -> None:
    choices = chosen(tmp_path, *overrides)
    assert choices.delta == mode and reason in choices.reasons["delta"]
