"""Errors that a dry run reports about model, data and engine, one line each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridengine.engine.vllm.environment import CPU_HEAD_SIZES
from hybridengine.model.validation import check_model, check_weights, longest_sequence
from hybridengine.run.config import ConfigError, load_config, load_sft_config
from hybridengine.train.checkpoint.folders import partial_folder, publish
from hybridengine.train.plan import start_of
from hybridengine.train.preflight import (
    check_device_memory,
    resident_bytes,
)
from tests.cli.conftest import refusal
from tests.model.own_code import DROPS_ARGUMENTS, save_own_code
from tests.model.rotary_configs import LONG_ROPE
from tests.tiny_models import save_tiny, tiny_config

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
TENSOR = "model.layers.0.mlp.down_proj.weight"


def rewrite(change: Callable[[dict[str, torch.Tensor]], object], file: Path) -> None:
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


DAMAGES = {
    "truncated": (lambda m: cut(m / WEIGHTS, -100), [WEIGHTS, "not fully covered", "copy it"]),
    "empty": (lambda m: cut(m / WEIGHTS, 0), ["model.safetensors", "(0 bytes)"]),
    "header cut": (lambda m: cut(m / WEIGHTS, 50), ["(50 bytes) cannot be read", "copy it"]),
    "a pointer": (
        lambda m: (m / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        ["Git LFS"],
    ),
    "no header": (
        lambda m: (m / WEIGHTS).write_bytes((8).to_bytes(8, "little") + b"nonsense"),
        ["cannot be read", "invalid JSON"],
    ),
    "grown": (
        lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes() + b"0"),
        ["not fully covered"],
    ),
    "missing tensor": (
        lambda m: rewrite(lambda w: w.pop(TENSOR), m / WEIGHTS),
        ["lack", TENSOR, "1 tensors"],
    ),
    "misshapen tensor": (
        lambda m: rewrite(lambda w: w.update({TENSOR: w[TENSOR][:7].clone()}), m / WEIGHTS),
        [TENSOR, "has shape [7, 96]", "expected [128, 96]"],
    ),
    "index no JSON": (lambda m: (m / INDEX).write_text("{"), [f"{INDEX} is not a valid index"]),
    "index a list": (lambda m: (m / INDEX).write_text("[1]"), [f"{INDEX} is not a valid index"]),
    "index without map": (
        lambda m: (m / INDEX).write_text("{}"),
        ["is not a valid index", "weight_map"],
    ),
    "index names others": (
        lambda m: (m / INDEX).write_text(json.dumps({"weight_map": {TENSOR: "other.safetensors"}})),
        ["lacks 'other.safetensors'"],
    ),
    "no tokenizer": (
        lambda m: [f.unlink() for f in m.glob("tokenizer*")],
        ["the tokenizer of model"],
    ),
    "tokenizer cut": (lambda m: cut(m / "tokenizer.json", 200), ["the tokenizer of model"]),
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


def test_a_shard_without_a_tensor_of_the_index(dry_run, model):
    weights = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, kept in parts.items():
        save_file({n: weights[n] for n in kept if n != TENSOR}, model / file, {"format": "pt"})
    index = {name: file for file, kept in parts.items() for name in kept}
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    line = refusal(dry_run())
    assert str(model) in line and TENSOR in line


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma2"])
def test_good_models_pass(tmp_path, kind):
    """Tied heads, fused experts and other names on disk are valid."""
    path = save_tiny(kind, tmp_path / kind)
    check_weights(path, check_model(path))


def test_a_model_that_leaks_between_packed_sequences(dry_run, model):
    save_own_code(model, DROPS_ARGUMENTS)
    for kind in ("grpo", "sft"):
        line = refusal(dry_run("model.trust_remote_code=true", kind=kind))
        assert "layers.1.self_attn (OwnAttention)" in line and "cannot run packed" in line


def test_token_ids_beyond_the_vocabulary(dry_run, model):
    vocabulary = json.loads((model / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["w5"] = 101
    (model / "tokenizer.json").write_text(json.dumps(vocabulary))
    for kind in ("grpo", "sft"):
        line = refusal(dry_run(kind=kind))
        assert "token id 101" in line and "vocabulary has 101 tokens" in line


def test_sequences_longer_than_the_model_supports(dry_run, tmp_path):
    line = refusal(dry_run("data.max_response_length=505"))
    assert "has 513 tokens, but the model was made for 512" in line
    assert "data.max_prompt_length or data.max_response_length" in line
    line = refusal(dry_run("rollout.max_model_len=600"))
    assert "600 tokens" in line and "lower rollout.max_model_len" in line
    long = {"prompt": "w3", "response": " ".join(["w4"] * 600)}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(long)}\n" * 4)
    line = refusal(dry_run("data.max_length=1024", kind="sft"))
    assert "longest conversation" in line and "made for 512" in line


def test_long_rope_that_vllm_computes_otherwise(dry_run, model):
    """The length that chooses its factors is that of the job."""
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = LONG_ROPE
    (model / "config.json").write_text(json.dumps(config))
    for kind in ("grpo", "sft"):
        assert dry_run(kind=kind).exit_code == 0
    config["rope_parameters"] = LONG_ROPE | {"attention_factor": 1.5}
    (model / "config.json").write_text(json.dumps(config))
    for kind in ("grpo", "sft"):
        assert "remove them from rope_parameters in config.json" in refusal(dry_run(kind=kind))


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 512),
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, 2048),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 512),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 128,
            },
            512,
        ),
    ],
)
def test_the_limit_with_scaled_rotary_positions(rope, limit):
    config = tiny_config("llama")
    config.rope_parameters = rope
    assert longest_sequence(config) == limit


def test_no_compiler_for_compiled_layers(dry_run, monkeypatch):
    for variable in ("CC", "CXX"):
        monkeypatch.setenv(variable, "no-such-compiler")
    for kind in ("grpo", "sft"):
        line = refusal(dry_run("model.compile=true", kind=kind))
        assert "no compiler no-such-compiler" in line and "set model.compile=false" in line


def test_keys_that_compiled_layers_and_graphs_do_not_support(dry_run):
    groups = "actor.fsdp_config.wrap_policy.min_num_params=9"
    assert "a compiled layer is one FSDP group" in refusal(dry_run("model.compile=true", groups))
    graphs = "model.cuda_graphs=true"
    line = refusal(dry_run(graphs, "actor.fsdp_config.param_offload=true"))
    assert "actor.fsdp_config.param_offload is True" in line and "set it to False" in line
    line = refusal(dry_run(graphs, "trainer.n_gpus_per_node=2"))
    assert "actor.fsdp_config.fsdp_size is -1" in line and "set it to 1" in line
    if not torch.cuda.is_available():
        assert "no GPU to capture graphs on" in refusal(dry_run(graphs, kind="sft"))
    assert "without forests" in dry_run(graphs, "actor.shared_prefix=on").stderr


@pytest.mark.slow
def test_target_modules_that_do_not_exist(dry_run):
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
        (
            "logits_processors=[m.Bias]",
            ["logits_processors would sample from another distribution"],
        ),
        ("speculative_config.method=ngram", ["speculative_config.num_speculative_tokens is None"]),
        ("speculative_config.method=eagle", ["'eagle', whose drafts are not examined", "ngram or"]),
        (
            "speculative_config={method: mtp, num_speculative_tokens: 1, draft_sample_method: any}",
            ["speculative_config.draft_sample_method is not examined with method mtp; remove it"],
        ),
        ("spec_method=ngram", ["spec_method is a part of speculative_config"]),
        ("kv_cache_dtype=fp8", ["kv_cache_dtype would sample from another distribution"]),
        (
            "override_generation_config.repetition_penalty=1.2",
            ["override_generation_config has no effect", "set rollout.temperature"],
        ),
    ],
)
def test_invalid_engine_options(dry_run, override, words):
    line = refusal(dry_run("rollout.name=vllm", f"rollout.engine_kwargs.vllm.{override}"))
    for word in ("rollout.engine_kwargs.vllm", *words):
        assert word in line


def test_a_variable_that_the_engine_cannot_have(dry_run, monkeypatch):
    monkeypatch.setenv("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "1")
    line = refusal(dry_run("rollout.name=vllm"))
    assert "VLLM_DISTRIBUTED_USE_SPLIT_GROUP is set" in line and "unset it" in line
    assert dry_run().exit_code == 0, "the plain engine does not read it"


def test_head_sizes_of_vllms_attention_on_a_cpu(dry_run, tmp_path, monkeypatch):
    backend = pytest.importorskip("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    assert [*CPU_HEAD_SIZES] == backend.get_supported_head_sizes()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = tiny_config("llama")
    config.head_dim = 48
    path = save_tiny(config, tmp_path / "wide")
    line = refusal(dry_run(f"model.path={path}", "rollout.name=vllm"))
    assert "no heads of size 48" in line and "set rollout.name=hf" in line
    assert dry_run(f"model.path={path}").exit_code == 0


def test_engine_options_need_vllm(dry_run):
    line = refusal(dry_run("rollout.engine_kwargs.vllm.block_size=16"))
    assert "plain generate" in line


def test_the_plan_contains_the_start_step(dry_run, tmp_path):
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
    publish_empty(tmp_path / "run")
    where = f"resumes after step 4, {tmp_path}/run/global_step_4"
    assert start_of(job, 40) == where
    assert start_of(job, 16) == f"{where}; all 4 steps are done"


def test_a_checkpoint_that_does_not_fit(dry_run, tmp_path):
    publish_empty(tmp_path / "run")
    for kind in ("grpo", "sft"):
        line = refusal(dry_run(kind=kind))
        assert "global_step_4 has no state of 'loader'" in line
        again = dry_run("trainer.resume_mode=disable", kind=kind)
        assert start_row(again) == "starts anew"


def publish_empty(run: Path) -> None:
    """Write a checkpoint of step 4 without any state."""
    written = partial_folder(run, 4)
    written.mkdir(parents=True)
    (written / "state.json").write_text("{}")
    publish(run, 4, None)


def start_row(result) -> str:
    assert result.exit_code == 0, (result.output, result.exception)
    [row] = [line for line in result.stdout.splitlines() if line.startswith("start ")]
    return row.removeprefix("start").strip()


def test_errors_of_model_data_and_engine_are_one_report(dry_run, tmp_path):
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


def test_disk_space_in_readable_units(dry_run, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    line = refusal(dry_run())
    assert "has 1000 bytes free, needs" in line and "KiB" in line


@pytest.mark.parametrize(
    ("settings", "bytes_of_weight"),
    [
        ((), 12),
        (("actor.use_kl_loss=true",), 16),
        (("actor.fsdp_config.optimizer_offload=true",), 4),
        (("actor.fsdp_config.param_offload=true", "actor.use_kl_loss=true"), 8),
        (("trainer.n_gpus_per_node=4",), 3),
        (("trainer.n_gpus_per_node=4", "actor.fsdp_config.fsdp_size=2"), 6),
        (("model.lora_rank=8", "actor.use_kl_loss=true"), 4),
        (("algorithm.adv_estimator=gae",), 24),
    ],
)
def test_what_stays_on_a_gpu_while_the_engine_generates(settings, bytes_of_weight):
    config = load_config(None, ["model.path=m", "data.train_files=d", *settings])
    assert resident_bytes(config, 1000, shares=False) == 1000 * bytes_of_weight


def test_engine_and_trainer_must_fit_on_a_gpu_together(model):
    """The engine gets half by default; masters and moments take 12 bytes of a weight."""
    needed = ["model.path=m", "data.train_files=d", "rollout.dtype=bfloat16"]
    config, checked = load_config(None, needed), check_model(str(model), False)
    numel = sum(t.numel() for t in load_file(model / WEIGHTS).values())
    check_device_memory(config, checked, 24.2 * numel, shares=False)
    with pytest.raises(ConfigError, match=r"the trainer keeps 0\.0 GiB .*optimizer_offload"):
        check_device_memory(config, checked, 23.8 * numel, shares=False)
    offloads = load_config(None, [*needed, "actor.fsdp_config.optimizer_offload=true"])
    check_device_memory(offloads, checked, 8.2 * numel, shares=False)
    with pytest.raises(ConfigError, match=r"less than the engine's weights of .*; raise it"):
        check_device_memory(offloads, checked, 3.8 * numel, shares=False)
    apart = [
        *needed,
        "trainer.mode=async",
        "rollout.n_gpus_per_node=1",
        "trainer.n_gpus_per_node=1",
    ]
    check_device_memory(load_config(None, apart), checked, 4.2 * numel, shares=False)
