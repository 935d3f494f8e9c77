"""LoRA on FSDP2 shards against PEFT on one process: gradients, merged export, adapter export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridengine.model import adapter_shards, apply_lora, check_lora
from hybridengine.run.errors import ModelError
from tests.loading import load_sharded
from tests.model.lora_shared import IDS, float64_update, reload, train_and_save, write_adapter
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny, word_tokenizer

LINEAR = (["q_proj", "o_proj", "down_proj"],)


@pytest.mark.multirank
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_exports_load_as_peft_and_transformers_load_them(tmp_path: Path, architecture: str) -> None:
    path = save_tiny(architecture, tmp_path / "base")
    result = run_ranks(train_and_save, 2, path, str(tmp_path), LINEAR, timeout_s=200)[0]
    adapted, merged, before = reload(path, tmp_path, result)
    with torch.no_grad(), adapted.disable_adapter():
        of_base = adapted(IDS).logits[0, :-1]
    torch.testing.assert_close(of_base, result["of_base"], atol=1e-4, rtol=0)
    after = merged.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    adapters = adapter_shards(adapted.base_model.model)
    assert changed == adapters.keys() and len(changed) == 6
    for name, adapter in adapters.items():
        assert torch.equal(after[name], (before[name].double() + float64_update(adapter)).float())
    # o_proj's columns are sharded, and so are its adapter's; the other factor goes by rows
    o_proj = "model.layers.0.self_attn.o_proj"
    assert result["placed"][f"{o_proj}.base_layer.weight"] == 1
    assert result["placed"][f"{o_proj}.lora_A.default.weight"] == 1
    assert result["placed"][f"{o_proj}.lora_B.default.weight"] == 0


@pytest.mark.parametrize(
    ("rank", "targets", "message"),
    [
        (0, "all-linear", "expected at least 1"),
        (4, ["k_pro"], "k_pro"),
        (4, ["lm_head"], "shares its weight with, the embedding"),
        (4, ["embed_tokens"], "embedding"),
        (4, ["input_layernorm"], "not supported"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_bad_targets_are_named(tmp_path: Path, rank: int, targets: object, message: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny("llama", tmp_path))
    with pytest.raises(ModelError, match=message):
        apply_lora(model, rank, 8, targets)


def test_fused_experts_stay_frozen_and_are_refused_by_name(tmp_path: Path) -> None:
    """PEFT itself adapts experts and routers where a name fits; here all-linear is what it says."""
    path = save_tiny("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    apply_lora(model, 4, 8, "all-linear")
    assert len(adapter_shards(model)) == 8 and all("self_attn" in n for n in adapter_shards(model))
    for target, match in (
        ("down_proj", r"no module .* 'down_proj'; name model.*experts.down_proj in target_param"),
        ("gate", "not supported"),
    ):
        with pytest.raises(ModelError, match=match):
            apply_lora(AutoModelForCausalLM.from_pretrained(path), 4, 8, ["q_proj", target])


def test_more_than_plain_lora_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = AutoModelForCausalLM.from_pretrained(save_tiny("llama", tmp_path))
    inject_adapter_in_model(LoraConfig(r=4, use_dora=True, target_modules=["q_proj"]), model)
    with pytest.raises(ModelError, match="DoRA"):
        adapter_shards(model)


def test_an_adapter_names_its_base_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridengine.train.checkpoint.pretrained import base_name

    (tmp_path / "models" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models")
    assert base_name("base") == base_name("../models/base") == str(tmp_path / "models" / "base")
    assert base_name("HuggingFaceTB/SmolLM2-135M") == "HuggingFaceTB/SmolLM2-135M"


def test_an_adapter_merged_by_peft_is_not_added_again(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(save_tiny("llama", tmp_path))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    assert len(adapter_shards(model)) == 2
    adapted.merge_adapter()
    with pytest.raises(ModelError, match=r"merged into its weight already.*unmerge_adapter"):
        adapter_shards(model)


def load_adapted(rank: int, world_size: int, path: str, adapter: str, out: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from hybridengine.train.checkpoint.pretrained import save_adapter

    model = load_sharded(
        path,
        mesh=init_device_mesh("cpu", (world_size,)),
        shard_dim1=lambda name: "o_proj" in name,
        param_dtype=torch.float32,
        adapt=lambda m: apply_lora(m, 3, 5.0, ["q_proj", "o_proj"], adapter),
        max_position_embeddings=77,
    )
    assert model.config.max_position_embeddings == 77
    save_adapter(model, word_tokenizer(), out)


@pytest.mark.multirank
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_starts_from_an_adapter_that_peft_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file

    path = save_tiny("llama", tmp_path / "base")
    write_adapter(path, tmp_path / "adapter", dtype)
    arguments = (path, str(tmp_path / "adapter"), str(tmp_path / "out"))
    run_ranks(load_adapted, 2, *arguments, timeout_s=200)
    before, after = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("adapter", "out")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
    assert all(tensor.any() for tensor in after.values())


@pytest.mark.parametrize(
    ("rank", "targets", "match"),
    [
        (3, ["q_proj"], "has 8 factors, and the model with target_modules has 4"),
        (4, ["q_proj", "o_proj"], r"is \[3, \d+\], the model needs \[4, \d+\]"),
    ],
)
def test_an_adapter_of_another_form_is_refused(tmp_path: Path, rank, targets, match) -> None:
    path = save_tiny("llama", tmp_path / "base")
    write_adapter(path, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(path)
    with pytest.raises(ModelError, match=match):
        apply_lora(model, rank, 5.0, targets, str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match=match):
        check_lora(model.config, rank, targets, str(tmp_path / "adapter"))


def test_an_adapter_without_safetensors_is_refused(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "base")
    write_adapter(path, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match="safe_serialization=True"):
        apply_lora(
            AutoModelForCausalLM.from_pretrained(path),
            3,
            5.0,
            ["q_proj", "o_proj"],
            str(tmp_path / "adapter"),
        )
