"""Checkpoints that are stored quantized: read, trained, and exported in 16 bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hybridengine.model.stored import dequantize
from hybridengine.model.validation import check_model, check_weights, meta_model, read_pretrained
from hybridengine.run.errors import ModelError
from hybridengine.train.checkpoint.pretrained import copy_unread
from tests.model.served_checkpoints import served_errors
from tests.quantized_checkpoints import quantize_fp8, quantize_mxfp4
from tests.tiny_models import save_tiny, word_tokenizer
from tests.train.in_process import run_jobs, small_job

VLLM = ["rollout.name=vllm", "rollout.kv_cache_gib=0.01"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plain")
    kinds = ("llama", "qwen3_moe", "gpt_oss")
    return {kind: Path(save_tiny(kind, folder / kind)) for kind in kinds}


@pytest.mark.parametrize(
    ("kind", "size", "error"),
    # FP8 has 3 bits of mantissa: half a step of 2^-4. 96 cuts the last blocks.
    [("llama", 32, 2**-4), ("llama", 96, 2**-4), ("qwen3_moe", 32, 2**-4), ("gpt_oss", 0, 0.25)],
)
def test_weights_are_dequantized(
    plain: dict[str, Path], tmp_path: Path, kind: str, size: int, error: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(plain[kind], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    if size:
        quantize_fp8(tmp_path, size)
    else:
        quantize_mxfp4(tmp_path)
    config = check_model(str(tmp_path))
    assert not hasattr(config, "quantization_config")
    check_weights(str(tmp_path), config)
    found = read_pretrained(str(tmp_path), config, dtype=torch.float32)
    changed = 0
    for (name, x), (other, y) in zip(
        model.named_parameters(), found.named_parameters(), strict=True
    ):
        assert name == other and y.dtype == torch.float32
        largest = x.abs().max()
        assert (x - y).abs().max() <= error * largest, name
        changed += not torch.equal(x, y)
    assert changed > 2
    assert not hasattr(found.config, "quantization_config")


def test_blocks_that_the_last_row_and_column_cut() -> None:
    weight = torch.randn(5, 7).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2)
    found = dequantize(weight, scales, (2, 4))
    for i in range(5):
        for k in range(7):
            assert found[i, k] == weight[i, k].float() * scales[i // 2, k // 4]


def test_scales_that_are_exponents() -> None:
    """As in E8M0, or as the bytes of MXFP8."""
    weight, exponents = torch.randn(4, 64).to(torch.float8_e4m3fn), torch.randint(-6, 6, (4, 2))
    scales = exponents.float().exp2()
    expected = dequantize(weight, scales, (1, 32))
    stored = scales.to(torch.float8_e8m0fnu)
    for found in (stored, (exponents + 127).to(torch.uint8)):
        assert torch.equal(dequantize(weight, found, (1, 32)), expected)


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    """transformers would read a weight without scales as it is, and spread those of fewer blocks.

    A layer that is not quantized, and is in no list of these, is read as it is.
    """
    folder, name = Path(save_tiny("llama", tmp_path)), "model.layers.0.self_attn.o_proj.weight"
    plain = load_file(folder / "model.safetensors")[name].clone()
    quantize_fp8(folder, 32)
    stored = dict(load_file(folder / "model.safetensors"))
    scales = stored.pop(f"{name}_scale_inv")
    for given, has in (({}, "no scales"), ({f"{name}_scale_inv": scales[:2]}, r".* \[2, 4\]")):
        save_file(stored | given, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=rf"{name} is in FP8 and has {has}, expected \[4, 4\]"):
            check_weights(str(folder), check_model(str(folder)))
    save_file(stored | {name: plain}, folder / "model.safetensors", {"format": "pt"})
    config = check_model(str(folder))
    check_weights(str(folder), config)
    found = read_pretrained(str(folder), config, dtype=torch.float32).get_parameter(name)
    assert torch.equal(found, plain)


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "fp8"}, "fp8 with one scale a tensor"),
        ({"quant_method": "fp8", "weight_block_size": [32]}, r"fp8 with weight_block_size \[32\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 32]}, r"fp8 with .* \[0, 32\]"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_what_cannot_be_dequantized(
    plain: dict[str, Path], tmp_path: Path, stored: dict, named: str
) -> None:
    config = AutoConfig.from_pretrained(plain["llama"]).to_dict() | {"quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=rf"is quantized \({named}\).* in 16 bits, in fp8 with"):
        check_model(str(tmp_path))


def stored_and_dequantized(folder: Path, kind: str) -> list[Path]:
    """Write the model of `kind` as it is published quantized, and what it is dequantized to."""
    stored, plain = folder / "stored", folder / "dequantized"
    save_tiny(kind, stored, torch.bfloat16)
    if kind == "gpt_oss":
        quantize_mxfp4(stored)
    else:
        quantize_fp8(stored, 32)
    config = check_model(str(stored))
    meta_model(config).save_pretrained(
        plain, state_dict=read_pretrained(str(stored), config, dtype=torch.float32).state_dict()
    )
    word_tokenizer().save_pretrained(plain)
    return [stored, plain]


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", []),
        pytest.param("llama", VLLM, marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", [], marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", VLLM, marks=pytest.mark.exhaustive),
    ],
)
def test_a_job_is_that_of_the_dequantized_model(
    tmp_path: Path, kind: str, settings: list[str]
) -> None:
    """Equal log-probs and equal final weights, which transformers loads without quantization."""
    results, finals = [], []
    for path in stored_and_dequantized(tmp_path, kind):
        folder = tmp_path / f"{path.name}_job"
        job = [*small_job(folder), f"model.path={path}", "trainer.total_training_steps=2"]
        results += run_jobs(folder, [[*job, *settings]])
        finals.append(folder / "run" / "final")
    one, other = results
    assert not one.refused and one.rollouts == other.rollouts and len(one.rollouts) == 2
    final, expected = (load_file(folder / "model.safetensors") for folder in finals)
    assert final.keys() == expected.keys()
    for name, x in expected.items():
        assert final[name].dtype == x.dtype and torch.equal(final[name], x), name
    loaded = AutoModelForCausalLM.from_pretrained(finals[0])
    assert not hasattr(loaded.config, "quantization_config")
    if settings == VLLM:
        _, errors = served_errors(finals[0], "bfloat16", AutoModelForCausalLM)
        assert errors.median() < 0.05 and errors.max() < 1  # a router may choose another expert


def test_layers_that_are_not_read_are_dequantized(tmp_path: Path) -> None:
    """Those of multi-token prediction, with their scales in another file."""
    folder, out = Path(save_tiny("llama", tmp_path / "stored")), tmp_path / "out"
    quantize_fp8(folder, 32)
    own = load_file(folder / "model.safetensors")
    weight = torch.randn(64, 96).to(torch.float8_e4m3fn)
    files = {
        "a.safetensors": own | {"mtp.0.proj.weight": weight, "mtp.0.norm.weight": torch.ones(4)},
        "b.safetensors": {"mtp.0.proj.weight_scale_inv": (scales := torch.rand(2, 3))},
    }
    (folder / "model.safetensors").unlink()
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    index: dict = {"metadata": {}}
    index |= {"weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = meta_model(check_model(str(folder)))
    AutoModelForCausalLM.from_config(model.config).save_pretrained(out)
    copy_unread(model, str(folder), out)
    found = {k: x for file in out.glob("*.safetensors") for k, x in load_file(file).items()}
    unread = {"mtp.0.proj.weight", "mtp.0.norm.weight"}
    assert found.keys() == {*dict(model.named_parameters()), *unread}
    expected = dequantize(weight, scales, (32, 32)).bfloat16()
    assert torch.equal(found["mtp.0.proj.weight"], expected)
