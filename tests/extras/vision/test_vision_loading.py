"""Options of loading and training with a vision tower: freezing, adapters, heads, compilation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlamaConfig

from hybridengine.compile import compile_layers
from hybridengine.distill import packed_distillation_loss
from hybridengine.model import (
    Optimizer,
    apply_lora,
    frozen_parameters,
    pack_rollouts,
    packed_log_probs,
    packed_logits,
    packed_values,
    parameter_shards,
)
from hybridengine.moe.router_replay import RouterReplay, SequenceRoutes
from hybridengine.run.errors import ModelError
from hybridengine.vision.formats import ImageFormat, freeze_vision_tower
from hybridengine.vision.packed import SequenceImages
from tests.extras.vision.vision_models import (
    VISION,
    alone,
    build,
    cases,
    save_vision,
    vision_models,
)
from tests.model.cases import LOGITS, load, loss_of
from tests.ranks import run_ranks
from tests.tensors import whole

pytestmark = pytest.mark.multirank


def batch_of(model: Any, kind: str, share: bool = True, **options: Any) -> Any:
    pairs, images = cases(kind)
    parts = {
        "images": SequenceImages(images, ImageFormat(model.config)),
        **options.pop("parts", {}),
    }
    return pack_rollouts(pairs, parts=parts, shared_prefix=share, **options)


def frozen_body(rank: int, world_size: int, path: str, kind: str) -> set[str]:
    model = load(path, world_size, adapt=freeze_vision_tower)
    tower = {n for n in parameter_shards(model) if "visual" in n or "vision_tower" in n}
    assert tower and frozen_parameters(model) == tower
    optimizer = Optimizer(model, lr=1e-2, total_steps=5)
    before = {n: whole(p).clone() for n, p in model.named_parameters()}
    batch = batch_of(model, kind)
    loss_of(packed_logits(model, batch), batch.target_ids).backward()
    assert all((p.grad is None) == (n in tower) for n, p in model.named_parameters())
    optimizer.step(1.0)
    assert len(optimizer.adamw.state) == len(before) - len(tower)
    return {n for n, p in model.named_parameters() if torch.equal(whole(p), before[n])}


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "internvl", "gemma3"])
def test_a_frozen_tower_has_no_gradient_and_no_moments(tmp_path: Path, kind: str) -> None:
    path = save_vision(kind, tmp_path)
    for unchanged in run_ranks(frozen_body, 2, path, kind):
        assert unchanged
        assert all("visual" in name or "vision_tower" in name for name in unchanged)


def test_a_model_without_a_tower_is_refused() -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1))
    with pytest.raises(ModelError, match="'llama' has no vision tower"):
        freeze_vision_tower(model)


@pytest.mark.parametrize("kind", VISION)
def test_all_linear_adapts_the_language_model_alone(kind: str) -> None:
    model = build(kind, "eager")
    linear = {
        name
        for name, module in model.get_decoder().named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    apply_lora(model, 2, 4.0)
    adapted = {n.split(".lora_A")[0] for n, _ in model.named_parameters() if ".lora_A" in n}
    assert {name.split("language_model.")[1] for name in adapted} == linear
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)


def values_body(rank: int, world_size: int, path: str, kind: str) -> torch.Tensor:
    model = load(path, world_size, value_head=True)
    head = model.get_output_embeddings().weight
    assert head.shape[0] == 1 and not whole(head).any()
    with torch.no_grad():
        head.fill_(1.0)
    batch = batch_of(model, kind)
    values = packed_values(model, batch)
    values.sum().backward()
    assert whole(model.get_encoder(modality="image").patch_embed.proj.weight.grad).any()
    return values.detach()


def test_a_critic_reads_images(tmp_path: Path) -> None:
    path = save_vision("qwen2_vl", tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager")
    model.lm_head = torch.nn.Linear(128, 1, bias=False)
    torch.nn.init.ones_(model.lm_head.weight)
    pairs, images = cases("qwen2_vl")
    expected = [
        alone(model, [*p, *r], own)[len(p) - 1 : -1, 0]
        for (p, r), own in zip(pairs, images, strict=True)
    ]
    (values,) = run_ranks(values_body, 1, path, "qwen2_vl")
    torch.testing.assert_close(values, torch.cat(expected), **LOGITS)


def test_compiled_layers_are_those_of_the_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without generating code: graphs and guards are those of the default backend."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled, eager = vision_models("qwen3_vl")[0], vision_models("qwen3_vl")[0]
    compile_layers(compiled.get_decoder().layers)
    for share in (False, True):
        batch = batch_of(eager, "qwen3_vl", share)
        ours, theirs = (packed_logits(model, batch) for model in (compiled, eager))
        torch.testing.assert_close(ours, theirs, **LOGITS)


def options_body(rank: int, world_size: int, path: str, kind: str) -> None:
    """A teacher that reads the same images; a compiled student; the images of a frozen model."""
    student = load(path, world_size, compile=True, enable_gradient_checkpointing=True)
    teacher = load(path, world_size).requires_grad_(False)
    batch = batch_of(student, kind)
    mask = torch.ones_like(batch.target_ids, dtype=torch.bool)
    loss, divergences = packed_distillation_loss(
        student, teacher, batch, response_mask=mask, num_items=mask.sum()
    )
    loss.backward()
    assert loss.abs() < 1e-5 and divergences.shape == batch.target_ids.shape
    log_probs, _ = packed_log_probs(student, batch)
    expected, _ = packed_log_probs(teacher, batch)
    torch.testing.assert_close(log_probs, expected, **LOGITS)


@pytest.mark.exhaustive
def test_distillation_between_models_with_images(tmp_path: Path) -> None:
    run_ranks(options_body, 2, save_vision("qwen2_vl", tmp_path), "qwen2_vl", timeout_s=500)


def test_routers_of_a_mixture_are_replayed() -> None:
    packed, _ = vision_models("qwen3_vl_moe")
    replay = RouterReplay(packed)
    plain = batch_of(packed, "qwen3_vl_moe", share=False)
    with torch.no_grad(), replay.record(plain.input_ids.shape[0]) as call:
        expected = packed_logits(packed, plain)
    routes = call.routes.split(plain.cu_seqlens.diff().tolist())
    batch = batch_of(packed, "qwen3_vl_moe", parts={"routes": SequenceRoutes(routes)})
    torch.testing.assert_close(packed_logits(packed, batch), expected, **LOGITS)
    counts = replay.pop_counts()
    assert counts.tokens == batch.input_ids.shape[0] and counts.differing_tokens == 0


def test_sequence_parallelism_is_refused() -> None:
    packed, _ = vision_models("qwen2_vl")
    with pytest.raises(ModelError, match="set ulysses_sequence_parallel_size to 1"):
        batch_of(
            packed, "qwen2_vl", sequence_parallel=SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        )
