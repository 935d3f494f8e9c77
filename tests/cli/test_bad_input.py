"""Bad input: one line and exit code 2, before a rank starts or a file is written."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from hybridengine import cli
from tests.cli.conftest import PROMPT, refusal


def test_a_good_job_passes_and_prints_its_plan(dry_run, tmp_path):
    result = dry_run("rollout.n=2")
    assert result.exit_code == 0, result.output
    assert "4 prompts, 8 responses, 1 optimizer step" in result.stdout
    assert "4 prompts, 1 steps per epoch, 1 in all" in result.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.nn=4", ["rollout.nn", "did you mean rollout.n?"]),
        ("model.path={dir}/nothing", ["nothing", "check the path"]),
        ("model.path={dir}", ["config.json"]),
        ("data.train_files={dir}/none.parquet", ["none.parquet does not exist"]),
        ("data.val_files={dir}/none.jsonl", ["none.jsonl does not exist"]),
        ("data.prompt_key=question", ["line 1", "no column 'question'", "prompt, reward_model"]),
        ("data.max_prompt_length=2", ["line 1", "3 tokens", "more than", "2"]),
        ("data.train_batch_size=5", ["only 4 training prompts"]),
        ("data.chat_template=none.jinja", ["none.jinja", "neither"]),
        ("reward.custom_reward_function.path={dir}/none.py", ["none.py does not exist"]),
        ("reward.custom_reward_function.name=score", ["no function 'score'", "compute_score"]),
        ("actor.fsdp_config.fsdp_size=3", ["fsdp_size is 3", "does not divide the 1 ranks"]),
        ("trainer.default_local_dir={dir}/reward.py/run", ["reward.py", "is not writable"]),
    ],
)
def test_refused(dry_run, tmp_path, override, words):
    line = refusal(dry_run(override.format(dir=tmp_path)))
    for word in words:
        assert word in line
    assert not (tmp_path / "run").exists()


def test_options_that_plain_generate_lacks(dry_run):
    plain = ["rollout.name=hf", "model.lora_rank=4", "reshard.lora=adapters"]
    assert "reshard.lora is adapters, but the engine is plain" in refusal(dry_run(*plain))
    ranks = ["trainer.n_gpus_per_node=2", "rollout.tensor_model_parallel_size=2"]
    line = refusal(dry_run("rollout.name=hf", *ranks))
    assert "rollout.tensor_model_parallel_size is 2, but the engine is plain" in line
    assert dry_run(*plain, *ranks).stderr.startswith("error: 2 settings cannot be used")


def test_tp_size_must_divide_the_heads(dry_run):
    ranks = ["trainer.n_gpus_per_node=3", "rollout.tensor_model_parallel_size=3"]
    result = dry_run(*ranks, "data.train_batch_size=3")
    _, heads, engine = sorted(result.stderr.splitlines(), key=lambda line: "plain generate" in line)
    assert result.exit_code == 2 and "plain generate" in engine
    assert "does not divide the model's 4 attention heads" in heads
    assert "choose one of [1, 2, 4]" in heads


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "raise ValueError('no key')",
            ["raised ValueError: no key", "reward.py:2", "ground truth"],
        ),
        ("return 'good'", ["'good'", "expected a finite number", "prompt 'w3 w4 w5"]),
        ("return float('nan')", ["nan", "expected a finite number"]),
        ("return 10**400", ["its result is 1000", "(int), expected a finite number"]),
        ("import os; os._exit(0)", ["ended its process with exit code 0", "reward.py:1"]),
        ("import sys; sys.exit(0)", ["raised SystemExit: 0 at", "reward.py:2", "prompt 'w3 w4 w5"]),
    ],
)
def test_reward_functions_that_fail(dry_run, tmp_path, source, words):
    definition = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    "
    (tmp_path / "reward.py").write_text(definition + source)
    line = refusal(dry_run())
    for word in words:
        assert word in line


def test_rows_without_a_rule_need_a_function(dry_run, tmp_path):
    """Also where only a later row has no rule."""
    line = refusal(dry_run("reward.custom_reward_function.path=[]"))
    assert "no rule for data_source 'toy'" in line and "openai/gsm8k" in line
    gsm8k = PROMPT | {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "18"}}
    rows = [gsm8k] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert dry_run("reward.custom_reward_function.path=[]").exit_code == 0
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*rows, PROMPT]))
    line = refusal(dry_run("reward.custom_reward_function.path=[]"))
    assert "no rule for data_source 'toy'" in line


@pytest.mark.parametrize(
    ("rule", "truth", "words"),
    [
        ("math_verify", [3, 43], ["is [3, 43], a list", "needs a number or an answer as text"]),
        ("math_verify", "", ["is '', not an answer that math_verify can parse"]),
        ("gsm8k", "eighteen", ["is 'eighteen'; the rule gsm8k expects a number"]),
        ("[]", "eighteen", ["is 'eighteen'; the rule gsm8k expects a number"]),
    ],
)
def test_a_ground_truth_that_no_response_can_equal(dry_run, tmp_path, rule, truth, words):
    """In a later row, of which no answer is tried."""
    gsm8k = PROMPT | {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "18"}}
    rows = [gsm8k] * 4 + [gsm8k | {"reward_model": {"ground_truth": truth}}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = refusal(dry_run(f"reward.custom_reward_function.path={rule}"))
    for word in (*words, "row 4 of the data (from 0)"):
        assert word in line


def test_half_of_a_surrogate_pair(dry_run, tmp_path):
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps(PROMPT | {"extra_info": {"name": "\ud83d"}}))
    line = refusal(dry_run())
    assert "rows.jsonl, line 5 has '\\ud83d', half of a surrogate pair" in line


def test_malformed_parquet(dry_run, tmp_path):
    pq.write_table(pa.Table.from_pylist([PROMPT]), tmp_path / "cut.parquet")
    content = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    line = refusal(dry_run(f"data.train_files={tmp_path}/cut.parquet"))
    assert "cut.parquet is not a readable parquet file" in line


def test_missing_config():
    result = CliRunner().invoke(cli.app, ["grpo", "none.yaml"])
    where = f"none.yaml (in {Path.cwd()})"
    assert refusal(result) == f"error: config file {where} does not exist; check the path"


def test_relative_paths_name_the_folder_they_start_from(dry_run):
    for override in ("data.train_files=a.jsonl", "model.external_lib=a.py", "model.path=./a"):
        line = refusal(dry_run(override))
        assert f"(in {Path.cwd()}) does not exist" in line


MISTAKES = {  # settings, and what must be reported of them
    "rollout.nn=4": ["did you mean rollout.n?"],
    "data.max_prompt_length=long": ["data.max_prompt_length is 'long'"],
    "actor.ppo_mini_batch_size=3": ["which does not divide data.train_batch_size 4"],
    "trainer.logger=[wandb]": ["names wandb"],
    "trainer.default_local_dir=/proc/nope": ["stores no files"],
    "model.path={dir}/nothing": ["nothing does not exist"],
    "critic.model.path={dir}/critic": ["critic does not exist"],
    "reward.reward_model.enable=true": [],
    "reward.reward_model.model_path={dir}/judge": ["judge does not exist"],
    "data.train_files={dir}/bad.jsonl": ["bad.jsonl, line 1 is not JSON"],
    "data.val_files=[{dir}/none.jsonl,{dir}/chats.jsonl]": [
        "none.jsonl does not exist",
        "chats.jsonl, line 1: prompt is 'w3 w4', expected a chat",
    ],
    "reward.custom_reward_function.path=[{dir}/none.py,{dir}/reward.py]": ["none.py does not"],
    "algorithm.adv_estimator=grop": ["did you mean 'grpo'?"],
    "rollout.engine_kwargs.vllm.block_size=16": ["rollout.engine_kwargs.vllm is"],
    "rollout.quantization=fp8": ["rollout.quantization is fp8, but the engine is plain generate"],
}


def test_every_mistake_is_in_one_list(dry_run, tmp_path, monkeypatch):
    monkeypatch.setattr("hybridengine.loggers.find_spec", lambda name: None)
    (tmp_path / "bad.jsonl").write_text("{")
    words = [word for several in MISTAKES.values() for word in several]
    for flags in (("--dry-run",), ()):
        result = dry_run(*(key.format(dir=tmp_path) for key in MISTAKES), flags=flags)
        assert result.exit_code == 2, (result.output, result.exception)
        first, *faults = result.stderr.splitlines()
        assert first == f"error: {len(words)} settings cannot be used:", faults
        for word in words:
            assert sum(word in fault for fault in faults) == 1, word
    assert not (tmp_path / "run").exists()
    sft = dry_run("optim.lrr=1", "data.train_files=none.jsonl", "data.val_files=rows", kind="sft")
    assert sft.stderr.startswith("error: 3 settings cannot be used"), sft.stderr


def test_what_follows_from_a_mistake_is_not_reported(dry_run, tmp_path):
    assert "data.train_batch_size is 'x'" in refusal(dry_run("data.train_batch_size=x"))
    assert "data.train_files is required" in refusal(dry_run("data.train_files=[]"))
    assert "model.path is required" in refusal(dry_run("model.path="))
    for key in ("algorithm.distill.teacher_path", "critic.model.path"):
        assert "none does not exist" in refusal(dry_run(f"{key}={tmp_path}/none"))
    assert "rollout.n?" in refusal(dry_run("rollout.nn=4", "--print-config"))


def test_ranks_of_torchrun_report_what_rank_0_does(dry_run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        result = dry_run("rollout.nn=4", "data.train_files=none.jsonl", flags=())
        assert result.stderr.startswith("error: 3 settings cannot be used")
        for words in ("rollout.n?", "none.jsonl", "torchrun started 2 ranks"):
            assert words in result.stderr


def test_mistakes_of_all_stages_come_together(dry_run, tmp_path, monkeypatch):
    """Loggers, disk, model, data and reward; the batch where there is a tokenizer."""
    monkeypatch.setattr("hybridengine.loggers.find_spec", lambda name: None)
    wandb, reward = "trainer.logger=[wandb]", f"reward.custom_reward_function.path={tmp_path}"
    good_model = dry_run(wandb, "data.train_batch_size=5", reward)
    assert "names wandb, which is not installed" in good_model.stderr
    assert f"reward file {tmp_path} is a folder" in good_model.stderr
    batch = dry_run(wandb, "data.train_batch_size=5", "rollout.max_model_len=4096")
    for part in ("names wandb", "only 4 training prompts", "lower rollout.max_model_len"):
        assert part in batch.stderr
    files = ["model.path=./a", "data.train_files=a.jsonl", "trainer.default_local_dir=/proc/nope"]
    result = dry_run(wandb, *files, reward)
    assert result.exit_code == 2 and result.stderr.startswith("error: 5 settings cannot be used")
    for part in ("names wandb", "model path", "data file", "stores no files", "is a folder"):
        assert part in result.stderr
    sft = dry_run(wandb, *files, kind="sft")
    assert sft.stderr.startswith("error: 4 settings cannot be used")


def test_a_group_of_one_is_noted(dry_run):
    result = dry_run("rollout.n=1")
    assert result.exit_code == 0
    assert "note: rollout.n is 1, and algorithm.adv_estimator grpo" in result.stderr
    assert "rollout.n is" not in dry_run("rollout.n=2").stderr


def test_a_group_of_one_is_noted_for_a_users_estimator(dry_run, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from hybridengine.train.algorithms import register_estimator\n"
        '@register_estimator("best_of_group", needs=("group_ids",))\n'
        "def best_of_group(responses, options): ...\n"
    )
    keys = (f"model.external_lib={own}", "algorithm.adv_estimator=best_of_group")
    assert "adv_estimator best_of_group compares" in dry_run("rollout.n=1", *keys).stderr


def test_several_nodes_need_torchrun(dry_run):
    assert "start this command under torchrun" in refusal(dry_run("trainer.nnodes=2", flags=()))


def test_the_world_size_of_torchrun_must_match(dry_run, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "torchrun started 4 ranks" in refusal(dry_run(flags=()))


def test_env_lists_versions_and_kernels():
    result = CliRunner().invoke(cli.app, ["env"])
    assert result.exit_code == 0, result.output
    for word in ("torch", "transformers", "CPU:", "GPU:", "token_log_probs", "strided_copy"):
        assert word in result.stdout


def test_paths_of_the_demo_exist():
    from hybridengine.run.config import load_config

    demo = Path(__file__).parents[2] / "examples" / "demo"
    config = load_config(demo / "config.yaml")
    assert (demo / Path(config.data.chat_template).name).is_file()
    [(reward, _)] = config.reward.functions
    assert (demo / Path(reward).name).is_file()
