"""What a dry run finds in model, data and engine settings: one sentence each, before a rank."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.checkpoint.folders import partial, publish
from hybridengine.config import load_sft_config
from hybridengine.model.checking import check_model, longest_sequence
from hybridengine.model.weight_files import check_weights
from hybridengine.trainer.plan import start_of
from tests.tiny_models import save_tiny, tiny_config

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
PROMPT = {
    "data_source": "toy",
    "prompt": [{"role": "user", "content": "w3 w4 w5"}],
    "reward_model": {"ground_truth": "w6"},
}
WEIGHTS = "model.safetensors"
TENSOR = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return Path(save_tiny("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture
def model(saved, tmp_path) -> Path:
    """A copy of a good model, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def dry_run(model, tmp_path) -> Callable:
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

    def run(*overrides: str, kind: str = "grpo"):
        arguments = [kind, *common, *jobs[kind], *overrides, "--dry-run"]
        merged = {o.split("=")[0]: o for o in arguments}
        return CliRunner().invoke(cli.app, [*merged.values()])

    return run


def refusal(result) -> str:
    assert result.exit_code == 2, (result.output, result.exception)
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ") and "Traceback" not in result.output
    return line


def rewrite(change: Callable[[dict[str, torch.Tensor]], object], file: Path) -> None:
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


DAMAGES = {
    "truncated": (lambda m: cut(m / WEIGHTS, -100), ["model.safetensors", "expected", "copy it"]),
    "empty": (lambda m: cut(m / WEIGHTS, 0), ["model.safetensors", "has 0 bytes"]),
    "header cut": (lambda m: cut(m / WEIGHTS, 50), ["has 50 bytes, less than its own header"]),
    "a pointer": (
        lambda m: (m / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        ["Git LFS"],
    ),
    "no header": (
        lambda m: (m / WEIGHTS).write_bytes((8).to_bytes(8, "little") + b"nonsense"),
        ["is no safetensors file"],
    ),
    "grown": (
        lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes() + b"0"),
        ["bytes, expected"],
    ),
    "missing tensor": (
        lambda m: rewrite(lambda w: w.pop(TENSOR), m / WEIGHTS),
        ["lack", TENSOR, "1 tensors"],
    ),
    "misshapen tensor": (
        lambda m: rewrite(lambda w: w.update({TENSOR: w[TENSOR][:7].clone()}), m / WEIGHTS),
        [TENSOR, "is [7, 96]", "makes it [128, 96]"],
    ),
    "index no JSON": (
        lambda m: (m / "model.safetensors.index.json").write_text("{"),
        ["model.safetensors.index.json is no index"],
    ),
    "index a list": (
        lambda m: (m / "model.safetensors.index.json").write_text("[1]"),
        ["model.safetensors.index.json is no index"],
    ),
    "index without map": (
        lambda m: (m / "model.safetensors.index.json").write_text("{}"),
        ["is no index", "weight_map"],
    ),
    "index names others": (
        lambda m: (m / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {TENSOR: "model-00001-of-00002.safetensors"}})
        ),
        ["lacks 'model-00001-of-00002.safetensors'"],
    ),
    "no tokenizer": (
        lambda m: [f.unlink() for f in m.glob("tokenizer*")],
        ["has no tokenizer that can be read"],
    ),
    "tokenizer cut": (
        lambda m: cut(m / "tokenizer.json", 200),
        ["has no tokenizer that can be read"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_models(dry_run, model, damage):
    damaging, words = DAMAGES[damage]
    damaging(model)
    line = refusal(dry_run())
    assert str(model) in line
    for word in words:
        assert word in line
    if "tokenizer" not in damage:
        assert line == refusal(dry_run(kind="sft"))


def test_a_shard_that_lacks_what_its_index_names(dry_run, model):
    weights = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, kept in parts.items():
        save_file({n: weights[n] for n in kept if n != TENSOR}, model / file, {"format": "pt"})
    index = {name: file for file, kept in parts.items() for name in kept}
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    line = refusal(dry_run())
    assert str(model) in line and TENSOR in line


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma2"])
def test_good_models_pass(tmp_path, kind):
    """Tied heads, fused experts and other names on disk are no fault."""
    path = save_tiny(kind, tmp_path / kind)
    check_weights(path, check_model(path))


def test_more_tokens_than_the_embedding_has_rows(dry_run, model):
    vocabulary = json.loads((model / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["w5"] = 101
    (model / "tokenizer.json").write_text(json.dumps(vocabulary))
    for kind in ("grpo", "sft"):
        line = refusal(dry_run(kind=kind))
        assert "token id 101" in line and "vocabulary has 101 tokens" in line


def test_longer_than_the_model(dry_run, tmp_path):
    line = refusal(dry_run("data.max_response_length=505"))
    assert "has 513 tokens, but the model was made for 512" in line
    assert "data.max_prompt_length or data.max_response_length" in line
    line = refusal(dry_run("rollout.max_model_len=600"))
    assert "600 tokens" in line and "lower rollout.max_model_len" in line
    long = {"prompt": "w3", "response": " ".join(["w4"] * 600)}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(long)}\n" * 4)
    line = refusal(dry_run("data.max_length=1024", kind="sft"))
    assert "longest conversation" in line and "made for 512" in line


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 512),
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, 2048),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 1024),
        (
            {
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                "original_max_position_embeddings": 128,
            },
            512,
        ),
    ],
)  # fmt: skip
def test_the_limit_with_scaled_rotary_positions(rope, limit):
    config = tiny_config("llama")
    config.rope_parameters = rope
    assert longest_sequence(config) == limit


def test_target_modules_that_are_not_there(dry_run):
    lora = "model.lora_rank=4"
    for kind in ("grpo", "sft"):
        line = refusal(dry_run(lora, "model.target_modules=[q_proj,qproj]", kind=kind))
        assert "'qproj'" in line and "target_modules" in line
        assert "target_modules" in refusal(dry_run(lora, "model.target_modules=nothing", kind=kind))
        line = refusal(dry_run(lora, "model.target_modules=[embed_tokens]", kind=kind))
        assert "target_modules" in line or "no plain LoRA" in line
    assert dry_run(lora, "model.target_modules=[q_proj]").exit_code == 0


def test_a_cache_larger_than_the_memory(dry_run):
    line = refusal(dry_run("rollout.name=vllm", "rollout.kv_cache_gib=1e6"))
    assert "rollout.kv_cache_gib is 1e+06" in line and "GiB of memory; lower it" in line


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("no_such_option=1", ["no_such_option is no engine argument"]),
        ("block_sise=1", ["did you mean block_size?"]),
        ("enforce_eager=true", ["enforce_eager is set by rollout.enforce_eager"]),
        ("load_format=auto", ["load_format is set by the trainer"]),
    ],
)
def test_options_of_the_engine(dry_run, override, words):
    line = refusal(dry_run("rollout.name=vllm", f"rollout.engine_kwargs.vllm.{override}"))
    for word in ("rollout.engine_kwargs.vllm", *words):
        assert word in line


def test_options_of_vllm_for_plain_generate(dry_run):
    line = refusal(dry_run("rollout.engine_kwargs.vllm.block_size=16"))
    assert "plain generate" in line


def test_the_plan_says_where_the_run_starts(dry_run, tmp_path):
    assert start_row(dry_run(kind="sft")) == "starts anew"
    job = load_sft_config(
        None,
        [
            "model.path=m",
            "data.train_files=t.jsonl",
            "data.train_batch_size=4",
            f"trainer.default_local_dir={tmp_path}/run",
        ],
    )
    assert start_of(job, 40) == "starts anew"
    written = partial(tmp_path / "run", 4)
    written.mkdir(parents=True)
    (written / "state.json").write_text("{}")
    publish(tmp_path / "run", 4, None)
    where = f"resumes after step 4, {tmp_path}/run/global_step_4"
    assert start_of(job, 40) == where
    assert start_of(job, 16) == f"{where}; all 4 steps are done"


def test_a_resume_that_cannot_work(dry_run, tmp_path):
    written = partial(tmp_path / "run", 4)
    written.mkdir(parents=True)
    (written / "state.json").write_text("{}")
    publish(tmp_path / "run", 4, None)
    for kind in ("grpo", "sft"):
        line = refusal(dry_run(kind=kind))
        assert "global_step_4 holds no state of 'loader'" in line
        again = dry_run("trainer.resume_mode=disable", kind=kind)
        assert start_row(again) == "starts anew"


def start_row(result) -> str:
    assert result.exit_code == 0, (result.output, result.exception)
    [row] = [line for line in result.stdout.splitlines() if line.startswith("start ")]
    return row.removeprefix("start").strip()


def test_faults_of_model_data_and_engine_are_one_report(dry_run, tmp_path):
    result = dry_run(
        "model.lora_rank=4",
        "model.target_modules=[qproj]",
        f"data.train_files={tmp_path}/none.jsonl",
        "data.max_response_length=600",
    )
    assert result.exit_code == 2
    first, *faults = result.stderr.splitlines()
    assert first == "error: 3 settings cannot be used:"
    for words in ("made for 512", "'qproj'", "none.jsonl does not exist"):
        assert sum(words in fault for fault in faults) == 1


def test_seeds_above_the_limit(dry_run):
    line = refusal(dry_run(f"seed={2**63 + 1}"))
    assert "seed is 9223372036854775809" in line and "4294967295" in line
    assert dry_run(f"seed={2**32 - 1}").exit_code == 0


def test_disk_space_in_units_a_person_reads(dry_run, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    line = refusal(dry_run())
    assert "has 1000 bytes free where" in line and "KiB are needed" in line
