"""Text trained on checkpoints of vision-language models: the language model, alone and inside."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    Qwen2Tokenizer,
)

from hybridengine.engine.vllm.options import llm_options
from hybridengine.lab.export import export_checkpoint
from hybridengine.model import apply_lora, check_lora, parameter_shards
from hybridengine.model.stored import WRAPPERS
from hybridengine.model.validation import check_model, check_weights, read_pretrained
from hybridengine.run.config.common import OverrideConfig
from hybridengine.run.errors import ModelError
from hybridengine.train.checkpoint.pretrained import write_pretrained
from tests.architectures.catalogue import CATALOGUE
from tests.engines import engine_options
from tests.extras.hybrid.hybrid_models import hybrid_config
from tests.extras.remote.overlapped import run_overlapped
from tests.extras.remote.vllm_server import START_S, serving
from tests.model.served_checkpoints import served_errors
from tests.tiny_models import word_tokenizer
from tests.train.in_process import run_jobs, small_job

VLLM = ["rollout.name=vllm", "rollout.kv_cache_gib=0.01"]
LORA = ["model.lora_rank=3", "model.lora_alpha=5", "trainer.save_freq=2"]
EXPERTS = [*LORA, "model.target_modules=[o_proj]", "model.target_parameters=[experts.down_proj]"]
IDS = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(1))

_TOWERS: dict[str, dict[str, int]] = {
    "qwen3_5": dict(
        depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=128
    ),
    "gemma4": dict(num_hidden_layers=1, hidden_size=32, intermediate_size=32, head_dim=16)
    | dict(num_attention_heads=2, num_key_value_heads=2),
    "mistral3": dict(num_hidden_layers=1, hidden_size=32, intermediate_size=32, head_dim=16)
    | dict(num_attention_heads=2, image_size=28),
    "kimi_k25": dict(num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    | dict(num_attention_heads=2),
}
# Of kimi_k25, whose names transformers reads, and writes otherwise.
_PUBLISHED = {
    "language_model.model.blocks": "language_model.model.layers",
    "vision_tower.encoder.patch_embed": "vision_tower.patch_embed",
    "model.mm_projector": "mm_projector",
}
_TOWERS["qwen3_5_moe"] = _TOWERS["qwen3_5"]


def text_config(kind: str) -> PretrainedConfig:
    if kind.startswith("qwen3_5"):  # 128: of vLLM's DeltaNet on CPUs
        sizes = dict(linear_key_head_dim=128, linear_value_head_dim=128)
        return hybrid_config(f"{kind}_text", **sizes)
    names = {"gemma4": "gemma4_text", "kimi_k25": "deepseek_v3"}
    return CATALOGUE[names.get(kind, "mistral")].config()


def save_wrapped(kind: str, folder: Path) -> Path:
    """Write a tiny vision-language model of `kind`, with a layer of multi-token prediction."""
    vision_type = {"gemma4": "gemma4_vision", "mistral3": "pixtral"}.get(kind)
    vision = _TOWERS[kind] | ({"model_type": vision_type} if vision_type else {})
    text, more = text_config(kind).to_dict(), {}
    if kind == "kimi_k25":  # whose head vLLM takes for one of its own
        more, text["tie_word_embeddings"] = {"tie_word_embeddings": False}, False
        more["projection_hidden_size"] = 32
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **more)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    if kind == "kimi_k25":  # as its publisher and vLLM call it
        config.architectures = ["KimiK25ForConditionalGeneration"]
        config.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    file, tensors = folder / "model.safetensors", {"mtp.norm.weight": torch.rand(8)}
    for name, x in load_file(file).items():
        for written, published in _PUBLISHED.items():
            name = name.replace(written, published)
        tensors[name] = x
    save_file(tensors, file, {"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    return folder


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_language_model_computes_what_the_whole_computes(tmp_path: Path, kind: str) -> None:
    folder = save_wrapped(kind, tmp_path)
    config = check_model(str(folder))
    assert config.model_type == text_config(kind).model_type
    check_weights(str(folder), config)
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    text = read_pretrained(str(folder), config, dtype=torch.float32).eval()
    assert not any("vision" in name or "visual" in name for name, _ in text.named_parameters())
    expected, found = logits_of(whole), logits_of(text)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected)


def test_overrides_are_of_the_language_model(tmp_path: Path) -> None:
    folder, positions = save_wrapped("qwen3_5", tmp_path), {"max_position_embeddings": 77}
    assert check_model(str(folder), overrides=positions).max_position_embeddings == 77
    with pytest.raises(ModelError, match=r"override_config.rope: the config.json .* no such entry"):
        check_model(str(folder), overrides={"rope": 1})
    options = engine_options(str(folder))
    model = replace(options.model, override_config=OverrideConfig(**positions))
    as_trained = llm_options(replace(options, model=model))["hf_overrides"]
    assert as_trained(AutoConfig.from_pretrained(folder)).max_position_embeddings == 77


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: x for file in folder.glob("*.safetensors") for k, x in load_file(file).items()}


def assert_whole(final: Path, source: Path) -> None:
    """`final` is `source` but for the values of the language model."""
    found, expected = tensors_of(final), tensors_of(source)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        if "language_model" not in name and not name.startswith("lm_head"):
            assert found[name].dtype == x.dtype and torch.equal(found[name], x), name
    assert (final / "preprocessor_config.json").read_text() == '{"size": 28}'
    one, other = (json.loads((f / "config.json").read_text()) for f in (final, source))
    for config in (one, other):
        del config["dtype"]
        config["text_config"].pop("dtype", None)
        config.pop("transformers_version")
    assert one == other
    _, report = AutoModelForImageTextToText.from_pretrained(final, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_is_saved_is_the_whole(tmp_path: Path, kind: str) -> None:
    source, out = save_wrapped(kind, tmp_path / "source"), tmp_path / "out"
    config = check_model(str(source))
    model = read_pretrained(str(source), config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    state = parameter_shards(model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    write_pretrained(model, tokenizer, state, out, torch.float32, str(source))
    assert_whole(out, source)
    again = read_pretrained(str(out), check_model(str(out)), dtype=torch.float32)
    for name, x in parameter_shards(again).items():
        assert torch.equal(x, state[name]), name


@pytest.mark.exhaustive
@pytest.mark.multirank
@pytest.mark.parametrize("kind", WRAPPERS)
def test_vllm_serves_what_is_saved(tmp_path: Path, kind: str) -> None:
    source, out = save_wrapped(kind, tmp_path / "source"), tmp_path / "out"
    file = source / "model.safetensors"
    if not kind.startswith("qwen3_5"):  # vLLM knows the layers of MTP of these alone
        save_file(
            {k: x for k, x in load_file(file).items() if "mtp" not in k}, file, {"format": "pt"}
        )
    model = read_pretrained(str(source), check_model(str(source)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.1
    tokenizer, state = AutoTokenizer.from_pretrained(source), parameter_shards(model)
    write_pretrained(model, tokenizer, state, out, torch.float32, str(source))
    (out / "preprocessor_config.json").unlink()
    dtype = "float32" if kind in ("gemma4", "mistral3") else "bfloat16"  # of operators on CPUs
    name, errors = served_errors(out, dtype, AutoModelForImageTextToText)
    assert name.endswith("ForConditionalGeneration")
    if kind == "kimi_k25":  # DeepSeek-V3 alone is up to 1 off in bfloat16 on a CPU, too
        return
    if dtype == "float32":
        assert errors.max() < 1e-3
    else:  # rounding can change which of two experts a router chooses for a token
        assert errors.median() < 0.05 and errors.max() < 1


def job_of(kind: str, source: Path) -> list[str]:
    """Return a job of two steps beside the folder of its model."""
    job = [*small_job(source.parent), f"model.path={source}", "trainer.total_training_steps=2"]
    if kind.startswith("qwen3_5"):  # whose class of tokenizer transformers forces
        characters = [*map(chr, range(33, 127)), "Ġ", "<|endoftext|>"]
        tokenizer = Qwen2Tokenizer(vocab={x: i for i, x in enumerate(characters)}, merges=[])
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
        tokenizer.save_pretrained(source)
        # The tokens are characters: a "w" can come before any other, not only before a number.
        job += ["data.max_prompt_length=16", "reward.custom_reward_function.name=hashed"]
    return job


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mistral3", VLLM),
        ("qwen3_5", LORA),
        pytest.param("gemma4", [], marks=pytest.mark.exhaustive),
        pytest.param("gemma4", VLLM, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5_moe", EXPERTS, marks=pytest.mark.exhaustive),
        pytest.param("kimi_k25", [], marks=pytest.mark.exhaustive),
    ],
)
def test_a_job_trains_the_language_model(tmp_path: Path, kind: str, settings: list[str]) -> None:
    """GRPO: the engine samples from the trainer's model, `final/` is the whole."""
    source = save_wrapped(kind, tmp_path / "source")
    job = job_of(kind, source)
    [result] = run_jobs(tmp_path, [[*job, *settings]], world_size=1 if settings == VLLM else 2)
    assert not result.refused
    # Both sides in float32: far below what another model, or one a step old, would give.
    errors = [row.get("training/rollout_probs_diff_max") for row in result.rows]
    assert max(x for x in errors if x is not None) < 1e-3  # none in the row of a checkpoint
    final = tmp_path / "run" / "final"
    assert_whole(final, source)
    trained, before = tensors_of(final), tensors_of(source)
    assert not all(torch.equal(trained[name], x) for name, x in before.items())
    if "model.lora_rank=3" in settings:
        assert_adapter_is_of_the_whole(source, tmp_path / "run", tmp_path / "exported")


def assert_adapter_is_of_the_whole(source: Path, run: Path, out: Path) -> None:
    """PEFT, a job that starts from the adapter, and an export have the weights of `final/`."""
    folder = run / "final_adapter"
    whole, final = (
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        for path in (source, run / "final")
    )
    before, expected = logits_of(whole), logits_of(final)
    assert (before - expected).abs().max() > 1e-2
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of PEFT for factors that are missing
        adapted = PeftModel.from_pretrained(whole, str(folder))
    torch.testing.assert_close(logits_of(adapted), expected, atol=1e-4, rtol=0)
    config = check_model(str(source))
    text = read_pretrained(str(source), config, dtype=torch.float32)
    given = json.loads((folder / "adapter_config.json").read_text())
    assert Path(given["base_model_name_or_path"]) == source
    modules, parameters = given["target_modules"], given["target_parameters"] or ()
    for names in (modules, "|".join(map(re.escape, modules))):
        check_lora(config, 3, names, str(folder), target_parameters=parameters)
    apply_lora(text, 3, 5.0, modules, str(folder), parameters)
    torch.testing.assert_close(logits_of(text), expected, atol=1e-4, rtol=0)
    export_checkpoint(run, out)
    assert_whole(out, source)
    exported, trained = tensors_of(out), tensors_of(run / "final")
    assert all(torch.equal(x, trained[name]) for name, x in exported.items())


@pytest.mark.exhaustive  # test_servers.py has its decision
@pytest.mark.multirank
@pytest.mark.timeout(START_S + 300)
@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        ("mistral3", {}, 1e-3),
        ("qwen3_5", {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}, 0.05),
    ],
)
def test_a_server_of_the_whole(tmp_path: Path, kind: str, options: dict, error: float) -> None:
    source = save_wrapped(kind, tmp_path / "source")
    (source / "preprocessor_config.json").unlink()
    job = [*job_of(kind, source), "rollout.name=auto", "rollout.dtype=auto"]
    options |= {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 26}
    with serving(str(source), 1, tmp_path, inner=True, **options) as server:
        [run] = run_overlapped(tmp_path, [[*job, f"rollout.servers=[{server.url}]"]], 2)
    assert not run.refused
    errors = [row.get("training/rollout_probs_diff_max") for row in run.rows]
    assert max(x for x in errors if x is not None) < error
