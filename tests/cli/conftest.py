"""A good job of each kind, run with `--dry-run` on the command line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybridengine import cli
from tests.tiny_models import save_tiny

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
PROMPT = {
    "data_source": "toy",
    "prompt": [{"role": "user", "content": "w3 w4 w5"}],
    "reward_model": {"ground_truth": "w6"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return Path(save_tiny("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture
def model(saved, tmp_path) -> Path:
    """A copy of a good model, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def dry_run(model, tmp_path) -> Callable:
    """A function that runs a good job with some overrides."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(PROMPT)}\n" * 4)
    (tmp_path / "chats.jsonl").write_text('{"prompt": "w3 w4", "response": "w5 w6 w7"}\n' * 4)
    common = [
        f"model.path={model}",
        "data.train_batch_size=4",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    jobs = {
        "grpo": [
            f"data.train_files={tmp_path}/rows.jsonl",
            "data.max_prompt_length=8",
            "data.max_response_length=4",
            f"reward.custom_reward_function.path={tmp_path}/reward.py",
            "rollout.name=hf",
        ],
        "sft": [f"data.train_files={tmp_path}/chats.jsonl", "data.max_length=64"],
    }

    def run(*overrides: str, kind: str = "grpo", flags: tuple[str, ...] = ("--dry-run",)):
        arguments = [kind, *common, *jobs[kind], *overrides, *flags]
        merged = {o.split("=")[0]: o for o in arguments}
        return CliRunner().invoke(cli.app, [*merged.values()])

    return run


def refusal(result) -> str:
    """Return the one line on stderr of a refused job."""
    assert result.exit_code == 2, (result.output, result.exception)
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ") and "Traceback" not in result.output
    assert result.stdout == ""
    return line
