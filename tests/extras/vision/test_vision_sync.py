"""FSDP2 ranks → real vLLM ranks with a vision tower: bits, log-probs, cached images, freezing."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras.vision.tiny_vision import PLACES, draw_squares, save_tiny_vision
from tests.ranks import run_ranks
from tests.sync.vllm_engines import build, unequal
from tests.tensors import whole

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


def prompts_of(preparer: Any, kind: str) -> tuple[list[list[int]], list[list[Any]]]:
    """A prompt with an image and one of text."""
    from hybridengine.vision import EncodedImage

    stored = BytesIO()
    draw_squares(3).save(stored, "PNG")
    image = EncodedImage.of_bytes("test", stored.getvalue())
    text = f"{PLACES[kind]}how many?"
    expanded, _ = preparer.expand("test", text, [image])
    tokenizer = preparer.processor.tokenizer
    return [tokenizer.encode(expanded), tokenizer.encode("say 5")], [[image], []]


def is_of_tower(name: str) -> bool:
    return "visual" in name or "vision_tower" in name


def change(model: Any, freeze: bool) -> None:
    """A training step, of the tower alone or of all but the tower."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_of_tower(name) != freeze:
                parameter.mul_(-1.25).add_(0.01)


def sync_body(rank: int, world_size: int, path: str, kind: str, tp_size: int, freeze: bool) -> dict:
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.model import pack_rollouts, packed_log_probs, parameter_shards
    from hybridengine.model.validation import check_model
    from hybridengine.vision import load_image_preparer
    from hybridengine.vision.formats import freeze_vision_tower

    adapt = freeze_vision_tower if freeze else None
    options = dict(param_dtype=torch.float32, enable_gradient_checkpointing=True)
    options["keep_vision_tower"] = True
    dtype = torch.bfloat16 if kind == "qwen3_5" else torch.float32
    engine, model, resharder = build(path, tp_size, dtype, 1 << 16, adapt, **options)
    preparer = load_image_preparer(check_model(path, keep_vision_tower=True), path, {})
    prompts, images = prompts_of(preparer, kind)
    spec, gaps, received = SamplingSpec(n=2, temperature=1.0, max_tokens=5), [], []
    for version in (1, 2, 3):
        received.append(resharder.sync(version).bytes_received)
        responses = engine.generate(prompts, spec, seed=0, images=images)
        rows = [(p, r, i) for p, rs, i in zip(prompts, responses, images, strict=True) for r in rs]
        batch = pack_rollouts(
            [(prompt, response.token_ids) for prompt, response, _ in rows],
            parts=preparer.parts([own for _, _, own in rows]),
            shared_prefix=True,
        )
        with torch.no_grad():
            log_probs, _ = packed_log_probs(model, batch)
        sampled = torch.cat([torch.as_tensor(response.log_probs) for _, response, _ in rows])
        gaps.append((log_probs - sampled).abs().max().item())
        change(model, freeze)
    resharder.sync(4)
    checkpoint = {n: whole(p) for n, p in parameter_shards(model).items()}
    weights = engine.target.weights()
    return {
        "gaps": gaps,
        "received": received,
        "tower": [name for name in weights if is_of_tower(name)],
        "trained": {n for n, p in model.named_parameters() if p.requires_grad},
        "unequal": unequal(weights, lambda: engine.target.load_full(checkpoint.items())),
    }


@pytest.mark.parametrize(
    ("kind", "world_size", "tp_size", "freeze"),
    [
        ("qwen2_vl", 2, 2, False),
        ("qwen2_vl", 2, 1, True),
        *(
            pytest.param(kind, 1, 1, False, marks=pytest.mark.exhaustive)
            for kind in ("qwen2_vl", "qwen3_5", "mistral3", "gemma4", "glm4v")
        ),
    ],
)
def test_the_tower_is_synced_and_its_images_are_encoded_again(
    tmp_path: Path, kind: str, world_size: int, tp_size: int, freeze: bool
) -> None:
    text = {"use_bidirectional_attention": None} if kind == "gemma4" else {}
    path = save_tiny_vision(kind, tmp_path, **text)
    for result in run_ranks(sync_body, world_size, path, kind, tp_size, freeze, timeout_s=500):
        assert result["unequal"] == [] and len(result["tower"]) > 15
        # float32 in other orders of summation; an image that was encoded by old weights is at 1.
        assert max(result["gaps"]) < (0.3 if kind == "qwen3_5" else 1e-3), result["gaps"]
        assert any(is_of_tower(name) for name in result["trained"]) != freeze
        first, *others = result["received"]
        assert (max(others) < first) == freeze, "a frozen tower is sent once"
