"""The attention of a rollout with images, as `hybridengine view --attention` computes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText

from hybridengine.lab.view.detail import compute_attention
from hybridengine.model import pack_rollouts, packed_logits
from hybridengine.model.attention import attention_of
from hybridengine.run.errors import ConfigError
from hybridengine.vision import EncodedImage, load_image_preparer
from tests.extras.vision.tiny_vision import draw_squares, save_tiny_vision
from tests.extras.vision.vision_models import IMAGE


@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3"])
def test_attention_and_entropies_are_those_of_the_images(tmp_path: Path, kind: str) -> None:
    path = save_tiny_vision(kind, tmp_path / "model")
    picture = tmp_path / "image.png"
    draw_squares(2).save(picture)
    model = AutoModelForImageTextToText.from_pretrained(path)
    model.set_attn_implementation(attention_of(model.config))
    preparer = load_image_preparer(model.config, path, {})
    assert preparer is not None
    image = EncodedImage.of_file("test", picture)
    length = preparer.inputs(image).num_tokens
    prompt, response = [5, *[IMAGE] * length, 6], [7, IMAGE, 8]  # which it sampled as text
    row = {"prompt_ids": prompt, "response_ids": response, "images": [str(picture)]}

    attention, entropies = compute_attention(row, Path(path))

    batch = pack_rollouts([(prompt, response)], parts=preparer.parts([[image]]))
    log_probs = packed_logits(model, batch).log_softmax(-1)
    assert entropies == pytest.approx((-(log_probs.exp() * log_probs).sum(-1)).tolist(), abs=1e-4)
    shape = attention.layers, attention.heads, len(attention.token_ids), len(attention.token_ids)
    weights = np.frombuffer(attention.weights, np.uint8).reshape(shape)
    later = np.triu(weights.max((0, 1)), 1)
    assert not later[length + 1 :].any(), "text is causal"
    assert later[1 : length + 1].any() == (kind == "gemma3")
    with pytest.raises(ConfigError, match=r"sha256:abc, which was in memory"):
        compute_attention({**row, "images": ["sha256:abc"]}, Path(path))
