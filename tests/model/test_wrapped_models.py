"""Text trained on checkpoints of vision-language models: the language model, alone and inside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    Qwen2Tokenizer,
)

from hybridengine.model import parameter_shards
from hybridengine.model.stored import WRAPPERS
from hybridengine.model.validation import check_model, check_weights, read_pretrained
from hybridengine.train.checkpoint.pretrained import write_pretrained
from tests.architectures.catalogue import CATALOGUE
from tests.extras.hybrid.hybrid_models import hybrid_config
from tests.tiny_models import word_tokenizer
from tests.train.in_process import run_jobs, small_job

VLLM = ["rollout.name=vllm", "rollout.kv_cache_gib=0.01"]

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
_TOWERS["qwen3_5_moe"] = _TOWERS["qwen3_5"]


def text_config(kind: str) -> PretrainedConfig:
    if kind.startswith("qwen3_5"):
        return hybrid_config(f"{kind}_text")
    names = {"gemma4": "gemma4_text", "kimi_k25": "deepseek_v3"}
    return CATALOGUE[names.get(kind, "mistral")].config()


def save_wrapped(kind: str, folder: Path) -> Path:
    """Write a tiny vision-language model of `kind`, with a layer of multi-token prediction."""
    vision_type = {"gemma4": "gemma4_vision", "mistral3": "pixtral"}.get(kind)
    vision = _TOWERS[kind] | ({"model_type": vision_type} if vision_type else {})
    config = AutoConfig.for_model(
        kind, text_config=text_config(kind).to_dict(), vision_config=vision
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    file, tensors = folder / "model.safetensors", {"mtp.norm.weight": torch.rand(8)}
    for name, x in load_file(file).items():  # which transformers takes for those of the tower
        tensors[name.replace("language_model.model.blocks", "language_model.model.layers")] = x
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
    tokens = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = whole(input_ids=tokens).logits, text(input_ids=tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected)


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


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mistral3", VLLM),
        ("qwen3_5", []),
        pytest.param("gemma4", [], marks=pytest.mark.exhaustive),
        pytest.param("gemma4", VLLM, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5_moe", [], marks=pytest.mark.exhaustive),
        pytest.param("kimi_k25", [], marks=pytest.mark.exhaustive),
    ],
)
def test_a_job_trains_the_language_model(tmp_path: Path, kind: str, settings: list[str]) -> None:
    """GRPO: the engine samples from the trainer's model, `final/` is the whole."""
    source = save_wrapped(kind, tmp_path / "source")
    job = [*small_job(tmp_path), f"model.path={source}", "trainer.total_training_steps=2"]
    if kind.startswith("qwen3_5"):  # whose class of tokenizer transformers forces
        characters = [*map(chr, range(33, 127)), "Ġ", "<|endoftext|>"]
        tokenizer = Qwen2Tokenizer(vocab={x: i for i, x in enumerate(characters)}, merges=[])
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
        tokenizer.save_pretrained(source)
        # The tokens are characters: a "w" can come before any other, not only before a number.
        job += ["data.max_prompt_length=16", "reward.custom_reward_function.name=hashed"]
    [result] = run_jobs(tmp_path, [[*job, *settings]], world_size=1 if settings else 2)
    assert not result.refused
    # Both sides in float32: far below what another model, or one a step old, would give.
    assert max(row["training/rollout_probs_diff_max"] for row in result.rows) < 1e-3
    final = tmp_path / "run" / "final"
    assert_whole(final, source)
    trained, before = tensors_of(final), tensors_of(source)
    assert not all(torch.equal(trained[name], x) for name, x in before.items())
