"""LoRA on fused experts against PEFT: gradients, shared factors, exports, initial adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridengine.model import adapter_shards, adapters_disabled, apply_lora, check_lora
from hybridengine.model.lora import peft_factors
from hybridengine.moe.experts import EXPERTS
from hybridengine.moe.router_replay import RouterReplay
from hybridengine.run.errors import ModelError
from hybridengine.train.checkpoint.pretrained import save_adapter
from tests.extras.moe.moe_models import (
    ARCHITECTURES,
    assert_close,
    assert_same_when_checkpointed,
    run,
    tiny_moe,
)
from tests.model.lora_shared import EXPERT_WEIGHTS, IDS, float64_update, reload, train_and_save
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny, word_tokenizer

SHARED = ("none", "outer", "all")


def adapted(kind: str, shared: Any = "none") -> Any:
    """A tiny mixture whose adapters of linear layers and experts are random."""
    model = tiny_moe(kind, **ARCHITECTURES[kind])
    experts = ["experts.up_proj", "experts.down_proj"] if kind == "nemotron_h" else EXPERT_WEIGHTS
    apply_lora(model, 3, 5.0, "all-linear", None, experts, shared)
    generator = torch.Generator().manual_seed(1)
    for factor in peft_factors(model).values():
        torch.nn.init.normal_(factor.parameter, std=0.1, generator=generator)
    return model


@pytest.mark.parametrize(
    ("kind", "shared"),
    [(kind, "none") for kind in ARCHITECTURES]
    + [(kind, shared) for kind in ("qwen3_moe", "gpt_oss") for shared in SHARED[1:]],
)
def test_outputs_and_gradients_are_those_of_merged_weights(kind: str, shared: str) -> None:
    """PEFT's own forward, which `eager` takes, adds the update to the weights."""
    model, ids = adapted(kind, shared), torch.randint(3, 100, (1, 24))
    assert model.config._experts_implementation == EXPERTS
    got = run(model, ids)
    with torch.no_grad(), adapters_disabled(model):
        base = model(input_ids=ids, use_cache=False).logits
    model.set_experts_implementation("eager")
    expected = run(model, ids)
    assert_close(got, expected)
    trained = [name for name in got[1] if ".experts." in name]
    assert trained and all("lora_" in name and got[1][name].any() for name in trained)
    original = tiny_moe(kind, **ARCHITECTURES[kind])
    original.set_experts_implementation(EXPERTS)
    assert torch.equal(base, original(input_ids=ids, use_cache=False).logits)
    assert (got[0] - base).abs().max() > 0.05


def test_replay_checkpointing_and_compiled_layers() -> None:
    model, ids = adapted("qwen3_moe"), torch.randint(3, 100, (1, 24))
    expected, replay = run(model, ids), RouterReplay(model)
    with replay.record(24) as recorded:
        model(input_ids=ids, use_cache=False)
    with replay.replay(recorded.routes):
        assert torch.equal(run(model, ids)[0], expected[0])
    assert_same_when_checkpointed(model, ids, expected)
    torch._dynamo.reset()
    block, hidden = model.model.layers[0].mlp, torch.randn(1, 9, 64)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(hidden), block(hidden))


@pytest.mark.multirank
@pytest.mark.parametrize("shared", SHARED)
def test_exports_load_as_peft_and_transformers_load_them(tmp_path: Path, shared: str) -> None:
    path = save_tiny("qwen3_moe", tmp_path / "base")
    targets = (["o_proj"], None, EXPERT_WEIGHTS, shared)
    result = run_ranks(train_and_save, 2, path, str(tmp_path), targets, timeout_s=200)[0]
    adapted, merged, before = reload(path, tmp_path, result)
    adapters, after = adapter_shards(adapted.base_model.model), merged.state_dict()
    assert {n for n in before if not torch.equal(before[n], after[n])} == adapters.keys()
    assert sum(".experts." in name for name in adapters) == 4 and len(adapters) == 6
    for name, adapter in adapters.items():
        assert torch.equal(after[name], (before[name].double() + float64_update(adapter)).float())
    # A run that starts from the exported adapter has its factors.
    started = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    apply_lora(started, 3, 5.0, ["o_proj"], str(tmp_path / "adapter"), *targets[2:])
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    factors = peft_factors(started)
    assert factors.keys() == stored.keys()
    assert all(torch.equal(f.stored(f.parameter), stored[name]) for name, f in factors.items())


def test_a_run_starts_from_an_adapter_that_peft_saved(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["q_proj"],
        target_parameters=list(EXPERT_WEIGHTS),
        init_lora_weights=False,
    )
    of_peft = get_peft_model(tiny_moe("mixtral", **ARCHITECTURES["mixtral"]), config)
    of_peft.save_pretrained(str(tmp_path))
    arguments = (3, 5.0, ["q_proj"], str(tmp_path), EXPERT_WEIGHTS)
    model = tiny_moe("mixtral", **ARCHITECTURES["mixtral"])
    apply_lora(model, *arguments)
    assert_close(run(model, IDS), run(of_peft.base_model.model.eval(), IDS))
    with pytest.raises(ModelError, match="differs between experts, but share_expert_adapters"):
        apply_lora(tiny_moe("mixtral", **ARCHITECTURES["mixtral"]), *arguments, "all")


def export_body(rank: int, world_size: int, out: str) -> torch.Tensor:
    model = adapted("deepseek_v3", "outer")
    save_adapter(model, word_tokenizer(), out)
    return model(input_ids=IDS, use_cache=False).logits.detach()


@pytest.mark.multirank
def test_shared_experts_are_linear_layers_also_in_files(tmp_path: Path) -> None:
    """PEFT reads gate_proj of a shared expert as experts, unless a file names its weight."""
    from peft import PeftModel

    [logits] = run_ranks(export_body, 1, str(tmp_path / "adapter"))
    base = tiny_moe("deepseek_v3", **ARCHITECTURES["deepseek_v3"])
    linear = [n for n, m in base.named_modules() if isinstance(m, torch.nn.Linear)]
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    names = {n.split(".lora_A")[0] for n, _ in model.named_parameters() if ".lora_A" in n}
    assert len(names) == len(linear) - 1 + 2  # without the head; two weights of fused experts
    assert len(adapter_shards(adapted("deepseek_v3"))) == len(names)
    torch.testing.assert_close(model(input_ids=IDS).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "target", ["mlp.gate.weight", "experts.gate_proj", "q_proj.weight", "input_layernorm.weight"]
)
def test_what_is_no_weight_of_experts_is_named(target: str) -> None:
    model = tiny_moe("qwen3_moe", **ARCHITECTURES["qwen3_moe"])
    with pytest.raises(ModelError, match=f"target_parameters: got '{target}', which names"):
        apply_lora(model, 3, 5.0, [], None, (target,))
    with pytest.raises(ModelError, match="expected weights of experts"):
        check_lora(model.config, 3, [], None, False, (target,))


def test_experts_alone() -> None:
    model = tiny_moe("deepseek_v3", **ARCHITECTURES["deepseek_v3"])
    apply_lora(model, 3, 5.0, [], None, ("experts.down_proj",))
    assert list(adapter_shards(model)) == ["model.layers.1.mlp.experts.down_proj"]
