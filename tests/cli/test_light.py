"""Help, the list of keys and --print-config do not import torch."""

import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hybridengine import __version__, cli
from hybridengine.run.config import load_config, overrides_of

FILES = ["model.path=m", "data.train_files=t.jsonl"]
# Runs the command, then reports on stderr which heavy packages it loaded.
PROBE = """
import sys
from hybridengine import cli
sys.argv = ["hybridengine", *sys.argv[1:]]
try:
    cli.app()
finally:
    heavy = {"torch", "transformers", "vllm", "pandas", "pyarrow", "matplotlib"}
    print("loaded:", sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["--help"], 0, "grpo"),
        (["--version"], 0, __version__),
        (["grpo", "--help"], 0, "KEY=VALUE"),
        (["keys", "sft", "optim"], 0, "optim.lr_warmup_steps_ratio"),
        (["keys", "nothing"], 2, "expected one of grpo, ppo, sft"),
        (["grpo", "none.yaml"], 2, "none.yaml (in "),
        (["ppo", *FILES, "rollout.nn=2", "--print-config"], 2, "rollout.n?"),
        (["sft", *FILES, "optim.lr=fast", "--print-config"], 2, "optim.lr is"),
    ],
)
def test_without_torch(arguments, exit_code, words):
    ended = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == exit_code, ended.stderr
    assert words in ended.stdout + ended.stderr
    assert "loaded: []" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_keys_lists_every_key_with_its_meaning():
    result = CliRunner().invoke(cli.app, ["keys", "ppo"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "gae" in lines["algorithm.adv_estimator"]
    assert "[0.9, 0.999]" in lines["actor.optim.betas"]
    assert "list of console | jsonl" in lines["trainer.logger"]
    assert "1e-05" in lines["critic.optim.lr"]


def test_hydras_way_to_name_the_file(tmp_path):
    (tmp_path / "multi.yaml").write_text("defaults: [ppo_trainer]\nrollout: {n: 3, top_k: 7}\n")
    given = [f"--config-path={tmp_path}", "--config-name=multi"]
    rest = ["model.path=m", "data.train_files=t.jsonl", "actor_rollout_ref.rollout.n=4"]
    result = CliRunner().invoke(cli.app, ["grpo", *given, *rest, "--print-config"])
    assert result.exit_code == 0, result.output
    printed = tmp_path / "printed.yaml"
    printed.write_text(result.stdout)
    config = load_config(printed)
    assert (config.rollout.n, config.rollout.top_k, config.model.path) == (4, 7, "m")
    assert config == load_config(tmp_path / "multi.yaml", rest)
    command = shlex.split(result.stdout.splitlines()[0], comments=False)
    assert command[:3] == ["#", "hybridengine", "grpo"] and len(command) == 7
    assert load_config(None, command[3:]) == config
    result = CliRunner().invoke(cli.app, ["grpo", "--config-name=ppo_megatron_trainer", *rest])
    assert result.exit_code == 2 and "go together" in result.stderr


def test_the_printed_command_means_the_configuration():
    stop, template = ["#", "1e3", "a b", 'x"\n', "null"], "{% for m in messages %}\n'{{ m }}'"
    given = {"rollout": {"stop": stop}, "data": {"chat_template": template}, "model.path": "7"}
    config = load_config(given, {"data.train_files": "t=1.jsonl", "actor.optim.lr": 1e-9})
    overrides = overrides_of("grpo", config)
    assert load_config(None, shlex.split(shlex.join(overrides))) == config
    assert not any("\n" in text for text in overrides) and len(overrides) == 5


def test_an_error_comes_without_notes(tmp_path):
    settings = [*FILES, "rollout.n=x", "--print-config"]
    ignored = "actor_rollout_ref.model.use_remove_padding=True"
    result = CliRunner().invoke(cli.app, ["grpo", *settings, ignored])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: rollout.n is 'x'")
