"""Every configuration in examples/ passes --dry-run from its own folder and from another one.

Models and data are tiny, under the names and paths that the examples give.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.run.config import load_job
from tests.extras.hybrid.hybrid_models import hybrid_config
from tests.tiny_models import save_classifier, save_tiny, word_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = sorted(
    str(file.relative_to(EXAMPLES))
    for file in EXAMPLES.rglob("*.yaml")
    if {"model", "data"} <= yaml.safe_load(file.read_text().split("\n---")[0]).keys()
)
pytestmark = pytest.mark.slow


def write_model(folder: Path) -> None:
    """The stand-in for the model that an example names by this path."""
    name = str(folder)
    if "vision" in name:
        runpy.run_path(str(EXAMPLES / "vision" / "prepare.py"))["save_model"](folder)
    elif "Skywork" in name:
        save_classifier("llama", folder)
        word_tokenizer().save_pretrained(folder)
    elif "hybrid" in name:
        save_tiny(hybrid_config("qwen3_5_text"), folder)
    else:
        save_tiny("qwen3_moe" if "moe" in name else "llama", folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 40960}))


def write_rows(file: Path) -> None:
    """Rows of RL and SFT in one, as many as the largest batch of an example."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if "vision" in str(file):
        rows = runpy.run_path(str(EXAMPLES / "vision" / "prepare.py"))["rows"](64, seed=1)
    else:
        truth: Any = "4"
        if "moe" in str(file) or "hybrid" in str(file):
            truth = {"kind": 0, "first": "w3", "following": {}}
        prompt = {"role": "user", "content": "w3 w4"}
        rows = [
            {
                "data_source": "toy",
                "prompt": [prompt],
                "response": "w5 w6",
                "reward_model": {"ground_truth": truth},
                "extra_info": {"interaction_kwargs": {"number": 3}},
            }
        ] * 1024
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the examples, with what they name."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(EXAMPLES, project / "examples")
    for name in CONFIGS:
        given = yaml.safe_load((EXAMPLES / name).read_text())
        reward_model = given.get("reward", {}).get("reward_model", {})
        distill = given.get("algorithm", {}).get("distill", {})
        critic = given.get("critic", {}).get("model", {})
        for model in (
            given["model"]["path"],
            reward_model.get("model_path"),
            distill.get("teacher_path"),
            critic.get("path"),
        ):
            if model and not (project / model).exists():
                write_model(project / model)
        for key in ("train_files", "val_files"):
            file = given["data"].get(key)
            if file and not (project / file).exists():
                write_rows(project / file)
    return project


@pytest.fixture(scope="module", autouse=True)
def recorded_once() -> Iterator[None]:
    """vLLM's loader is recorded once for each kind of model, not for each example."""
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    from hybridengine.lab import layouts

    original = layouts.record_engine_layouts
    cached: Callable[..., Any] = functools.cache(
        lambda content, path, tp_size, trust: original(path, tp_size, trust)
    )
    paths = dict[str, str]()  # of the first model with a configuration

    def once(path: str, tp_size: int, trust: bool) -> Any:
        content = Path(path, "config.json").read_text()
        return cached(content, paths.setdefault(content, path), tp_size, trust)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "record_engine_layouts", once)
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_every_example_passes_the_checks(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = project / "examples" / name
    kind = "sft" if "optim" in yaml.safe_load(file.read_text()) else "grpo"
    kind = "ppo" if "ppo" in name else kind
    monkeypatch.chdir(file.parent)
    result = CliRunner().invoke(cli.app, [kind, file.name, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "starts anew" in result.output
    here = load_job(kind, file.name)
    monkeypatch.chdir(tmp_path)
    assert load_job(kind, os.path.relpath(file)) == here  # so that its checks are the same


def test_the_examples_are_found() -> None:
    assert {"demo/config.yaml", "vision/grpo.yaml", "sft/lora.yaml", "launch/grpo.yaml"} <= {
        *CONFIGS
    }
    assert len(CONFIGS) >= 20
