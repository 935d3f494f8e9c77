"""Recording three layers of each structure gives the same layout as recording all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridengine.sync import loader
from hybridengine.sync.layout import EngineLayout
from hybridengine.sync.loader import record_checkpoint
from tests.architectures.catalogue import CATALOGUE, Entry
from tests.ranks import run_ranks

MAMBA = dict(
    mamba_n_heads=8,
    mamba_d_head=32,
    mamba_d_state=16,
    mamba_n_groups=1,
    mamba_expand=2,
    mamba_d_conv=4,
)
ALTERNATING = ["sliding_attention", "sliding_attention", "full_attention"] * 2


def longer(name: str, num_layers: int = 6, **overrides) -> Entry:
    entry = CATALOGUE[name]
    return Entry(
        entry.model_type,
        entry.overrides | {"num_hidden_layers": num_layers} | overrides,
        entry.sub_configs,
        entry.engine,
    )


def models() -> dict[str, Entry]:
    """Dense first layers, tied embeddings, alternating windows, Mamba beside attention."""
    hybrid = ["mamba", "mamba", "mamba", "attention"] * 2
    return {
        "llama, tied and biased": longer("llama (tied, biased)"),
        "deepseek_v3, two dense layers": longer("deepseek_v3", 7, first_k_dense_replace=2),
        "qwen3_moe": longer("qwen3_moe"),
        "gemma3, alternating": longer("gemma3_text", layer_types=ALTERNATING),
        "granitemoehybrid": longer("granitemoehybrid", 8, layer_types=hybrid),
        "qwen3_next": longer(
            "qwen3_next", 8, layer_types=[*["linear_attention"] * 3, "full_attention"] * 2
        ),
        "mamba2, with fallback": longer("mamba2"),
        "gpt2, transposed": longer("gpt2", n_layer=6),
    }


def record_both(rank: int, world_size: int, folder: str) -> dict[str, dict]:
    """Each model, at TP 2, recorded by class of layers and in full, in one process."""
    import torch.distributed as dist

    from hybridengine.lab.layouts import record_engine_layouts

    dist.destroy_process_group()  # the advisor makes a world of its own
    by_class, some, loaded = loader.layer_classes, loader.sampled_layers, []

    def counted(model, checkpoint):
        classes = by_class(model, checkpoint)
        loaded.append((sum(len(set(some(k))) for k in classes), sum(map(len, classes))))
        return classes

    results = {}
    for name, entry in models().items():
        config = entry.config()
        from transformers import AutoModelForCausalLM

        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
        path = Path(folder) / name.replace(" ", "_")
        config.save_pretrained(path)
        loaded.clear()
        loader.layer_classes, loader.sampled_layers = counted, some
        _, few = record_engine_layouts(str(path), 2)
        loader.sampled_layers = list
        _, full = record_engine_layouts(str(path), 2)
        results[name] = {
            "differs": [
                f
                for f in vars(full[0])
                if any(getattr(a, f) != getattr(b, f) for a, b in zip(few, full, strict=True))
            ],
            "digests": [a.digest() == b.digest() for a, b in zip(few, full, strict=True)],
            "loaded": loaded[0],
            "copies": len(full[0].copies),
            "fallback": len(full[0].fallback),
        }
    return results


@pytest.mark.multirank
def test_few_layers_give_the_layout_of_all(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    (results,) = run_ranks(record_both, 1, str(tmp_path), timeout_s=400)
    assert results.keys() == models().keys()
    for name, result in results.items():
        assert result["differs"] == [] and all(result["digests"]), name
        few, every = result["loaded"]
        assert few < every, f"{name}: nothing was saved"
        assert result["copies"] + result["fallback"] > every
    assert results["mamba2, with fallback"]["fallback"] == 6


class Toy(torch.nn.Module):
    """Four layers of one weight each on the meta device, and a loader under test."""

    def __init__(self, load) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 3, bias=False) for _ in range(5))
        self.to("meta")
        self.load, self.loaded = load, []

    def load_weights(self, weights) -> None:
        targets = dict(self.named_parameters())
        for name, weight in weights:
            self.loaded.append(name)
            self.load(targets, name, weight)


def record_toy(load) -> tuple[EngineLayout, list[str]]:
    toy = Toy(load)
    shapes = {f"layers.{i}.weight": (3, 2) for i in range(5)}
    checkpoint = record_checkpoint(shapes, dict)
    layout = loader.record_layout_by_layer(toy, toy.load_weights, checkpoint, torch.float32)
    return layout, toy.loaded


def test_three_of_equal_layers_are_loaded() -> None:
    layout, loaded = record_toy(lambda targets, name, w: targets[name].data.copy_(w))
    assert loaded == ["layers.0.weight", "layers.1.weight", "layers.4.weight"]
    assert [(c.source, c.destination) for c in layout.copies] == [
        (f"layers.{i}.weight",) * 2 for i in range(5)
    ]


def swapped(targets, name: str, weight: torch.Tensor) -> None:
    number = int(name.split(".")[1])
    targets[f"layers.{4 - number}.weight"].data.copy_(weight)


def last_differs(targets, name: str, weight: torch.Tensor) -> None:
    targets[name].data.copy_(weight.exp() if name.startswith("layers.4") else weight)


def alternating(targets, name: str, weight: torch.Tensor) -> None:
    odd = int(name.split(".")[1]) % 2
    targets[name].data.copy_(weight.exp() if odd else weight)


def all_in_one(targets, name: str, weight: torch.Tensor) -> None:
    if name == "layers.0.weight":
        for target in targets.values():
            target.data.copy_(weight)


@pytest.mark.parametrize("load", [swapped, last_differs, alternating, all_in_one])
def test_a_loader_that_tells_layers_apart_is_recorded_in_full(load) -> None:
    layout, loaded = record_toy(load)
    assert set(loaded) == {f"layers.{i}.weight" for i in range(5)}
    toy = Toy(load)
    assert set(layout.destinations) == {f"layers.{i}.weight" for i in range(5)}
    written = {c.destination for c in layout.copies} | layout.by_loader
    assert written == dict(toy.named_parameters()).keys()
    if load is swapped:
        assert {(c.source[7], c.destination[7]) for c in layout.copies} == {
            (str(i), str(4 - i)) for i in range(5)
        }
    if load is last_differs:
        assert list(layout.fallback) == ["layers.4.weight"]
