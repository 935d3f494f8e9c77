"""Unusable models are rejected from their name and files, before any weight is loaded."""

import json
import time
from pathlib import Path

import pytest
from transformers import (
    AutoConfig,
    FalconConfig,
    Mistral3Config,
    PaliGemmaConfig,
    Phi4MultimodalConfig,
    RwkvConfig,
    T5Config,
)

from hybridengine.model.packing_check import check_packing, shared_prefix_obstacle
from hybridengine.model.validation import check_model
from hybridengine.run.errors import ModelError
from tests.architectures.catalogue import CATALOGUE
from tests.tiny_models import save_tiny, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Path(save_tiny("llama", tmp_path_factory.mktemp("model")))


def copy_of(folder: Path, tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    return tmp_path


def test_a_valid_model_returns_its_config(folder):
    assert type(check_model(str(folder))) is type(tiny_config("llama"))


def test_no_such_folder():
    with pytest.raises(
        ModelError, match="model path /no/such/model does not exist; check the path"
    ):
        check_model("/no/such/model")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no-such-org/no-such-model", "nosuchmodel"])
def test_unreachable_hub_fails_within_seconds(name, monkeypatch):
    import huggingface_hub.constants as constants

    from hybridengine.model import validation

    monkeypatch.setattr(validation, "HUB_SECONDS", 2.0)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    start = time.monotonic()
    with pytest.raises(
        ModelError, match=r"is not a local folder in .*, and the Hugging Face hub has no"
    ):
        check_model(name)
    assert time.monotonic() - start < 20


def test_hub_that_never_answers_times_out(monkeypatch):
    from hybridengine.model import validation

    monkeypatch.setattr(validation, "HUB_SECONDS", 0.5)
    monkeypatch.setattr(validation.AutoConfig, "from_pretrained", lambda *a, **k: time.sleep(30))
    with pytest.raises(ModelError, match=r"no such model \(no answer in 0.5 s\)"):
        check_model("some-org/some-model")


def test_a_file_is_no_model(folder):
    with pytest.raises(ModelError, match="is a file; expected a folder"):
        check_model(str(folder / "config.json"))


def test_folder_without_config(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        check_model(str(tmp_path))


def test_config_and_tokenizer_without_weights(folder, tmp_path):
    copy_of(folder, tmp_path, "config.json", "tokenizer.json", "tokenizer_config.json")
    with pytest.raises(ModelError, match="but no weights"):
        check_model(str(tmp_path))


def test_index_that_names_missing_files(folder, tmp_path):
    copy_of(folder, tmp_path, "config.json", "model.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks 'model-00002.*1 of 2 weight files missing"):
        check_model(str(tmp_path))


def test_broken_config(folder, tmp_path):
    copy_of(folder, tmp_path, "model.safetensors")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be used"):
        check_model(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(), r"\(t5\) is not a causal language model"),
        (FalconConfig(), r"\(falcon\) cannot run packed: FalconForCausalLM does not call its"),
        (RwkvConfig(), r"RwkvForCausalLM carries a state along the sequence"),
        (PaliGemmaConfig(), r"\(paligemma\) also takes images, .* language model \(gemma\) alone"),
        (
            Mistral3Config(text_config={"model_type": "mistral4"}),
            r"\(mistral3\) also takes images, .* its language model \(mistral4\) alone",
        ),
        (Phi4MultimodalConfig(), r"\(phi4_multimodal\) .* of .*'qwen3_5', .* for text alone"),
    ],
)
def test_models_that_cannot_run(folder, tmp_path, config, message):
    copy_of(folder, tmp_path, "model.safetensors")
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        check_model(str(tmp_path))


def test_quantized_model(folder, tmp_path):
    copy_of(folder, tmp_path, "model.safetensors")
    config = AutoConfig.from_pretrained(folder).to_dict()
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is quantized"):
        check_model(str(tmp_path))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
def test_models_that_share_prefixes(kind):
    assert shared_prefix_obstacle(tiny_config(kind)) is None


@pytest.mark.parametrize("layers", [["attention"] * 2, ["mamba", "attention"]])
def test_a_hybrid_class_with_and_without_linear_attention(folder, tmp_path, layers):
    """Granite 4 Micro is of the hybrid class, and has attention layers alone."""
    entry = CATALOGUE["granitemoehybrid"]
    config = AutoConfig.for_model(entry.model_type, **entry.overrides | {"layer_types": layers})
    copy_of(folder, tmp_path, "model.safetensors")
    config.save_pretrained(tmp_path)
    checked = check_model(str(tmp_path))
    check_packing(str(tmp_path), checked)
    assert shared_prefix_obstacle(checked) is None


@pytest.mark.parametrize(
    ("model_type", "layers", "reason"),
    [
        ("zamba2", None, "['hybrid', 'linear_attention']"),
        ("llama4_text", ["chunked_attention"], "['chunked_attention']"),
        ("mamba", None, "['linear_attention']"),
        ("recurrent_gemma", None, "RecurrentGemmaForCausalLM carries a state"),
        ("t5", None, "its forward fails"),
    ],
)
def test_models_whose_layers_read_the_packed_order_do_not(model_type, layers, reason):
    config = AutoConfig.for_model(model_type)
    if layers is not None:
        config.layer_types = layers
    assert reason in str(shared_prefix_obstacle(config))
