"""Images become the tokens and tensors that transformers' own processor makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from hybridengine.run.errors import ConfigError, DataError, ModelError
from hybridengine.vision import EncodedImage, load_image_preparer, processor
from tests.extras.vision.tiny_vision import FAMILIES, draw_squares, encoded, save_tiny_vision

TEXT = "a<|image_pad|>b<|image_pad|><|image_pad|>c"


def preparer_of(kind: str, folder: Path, **options: object) -> processor.ImagePreparer:
    save_tiny_vision(kind, folder)
    preparer = load_image_preparer(AutoConfig.from_pretrained(folder), str(folder), options)
    assert preparer is not None
    return preparer


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_expanded_as_by_its_processor(tmp_path: Path, kind: str) -> None:
    """transformers' processor on all images at once is the oracle of one image at a time."""
    preparer = preparer_of(kind, tmp_path)
    images = [draw_squares(3), draw_squares(2).resize((40, 24)), draw_squares(1).resize((16, 48))]
    given = TEXT.replace("<|image_pad|>", preparer.processor.image_token)
    text, replaced = preparer.expand("here", given, [encoded(image) for image in images])
    oracle = preparer.processor(text=[given], images=images, return_tensors="pt")
    ids = preparer.processor.tokenizer(text, add_special_tokens=False).input_ids
    assert ids == oracle["input_ids"][0].tolist()
    assert len(text) == len(given) + sum(r.length - (r.end - r.start) for r in replaced)
    inputs = [preparer.inputs(encoded(image)) for image in images]
    assert ids.count(preparer.token_id) == sum(i.num_tokens for i in inputs)
    assert len({i.num_tokens for i in inputs}) > 1 or kind == "gemma3"
    joined = preparer.image_format.join(inputs)
    for name, tensor in joined.items():
        expected = oracle[name]
        if kind == "llava_onevision" and name == "pixel_values":  # padded to the most tiles
            parts = [i.tensors[name][0] for i in inputs]
            expected = torch.cat([x[: len(p)] for x, p in zip(expected, parts, strict=True)])
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def test_options_change_tokens_and_keys(tmp_path: Path) -> None:
    image = encoded(draw_squares(2))
    whole = preparer_of("qwen2_vl", tmp_path / "a")
    small = preparer_of("qwen2_vl", tmp_path / "b", max_pixels=256)
    assert (whole.inputs(image).num_tokens, small.inputs(image).num_tokens) == (9, 4)
    assert whole.key(image) != small.key(image)
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs has 'pixels', .*'max_pixels'"):
        preparer_of("qwen2_vl", tmp_path / "c", pixels=256)
    narrow = encoded(Image.new("RGB", (2, 900)), "row 7")
    with pytest.raises(DataError, match=r"row 7: the processor .* refuses the image .* 2 x 900"):
        whole.inputs(narrow)


def test_several_parts_of_an_image_are_refused(tmp_path: Path) -> None:
    preparer = preparer_of("gemma3", tmp_path, do_pan_and_scan=True, pan_and_scan_min_crop_size=8)
    assert preparer.inputs(encoded(draw_squares(1))).num_tokens == 4
    wide = encoded(draw_squares(1).resize((64, 24)), "row 7")
    with pytest.raises(DataError, match=r"row 7: the processor .* makes 4 parts of the image"):
        preparer.inputs(wide)


def test_an_image_is_prepared_once_while_it_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer = preparer_of("qwen2_vl", tmp_path)
    images = [encoded(draw_squares(n)) for n in (1, 2, 3)]
    first = preparer.inputs(images[0])
    assert preparer.inputs(EncodedImage.of_bytes("another row", images[0].data)) is first
    size = first.tensors["pixel_values"].nbytes + first.tensors["image_grid_thw"].nbytes
    monkeypatch.setattr(processor, "CACHE_BYTES", 2 * size)
    second = preparer.inputs(images[1])
    assert preparer.inputs(images[1]) is second
    assert preparer.inputs(images[0]) is first
    preparer.inputs(images[2])  # in the place of the one that was used least recently
    assert preparer.inputs(images[0]) is first
    assert preparer.inputs(images[1]) is not second, "two are kept"


def test_placeholders_and_images_have_to_match(tmp_path: Path) -> None:
    preparer = preparer_of("qwen2_vl", tmp_path)
    with pytest.raises(DataError, match=r"'<.image_pad.>' 3 times for 1 images"):
        preparer.expand("here", TEXT, [encoded(draw_squares(1))])
    assert preparer.expand("here", "text", []) == ("text", [])


def test_models_without_images_and_without_a_processor(tmp_path: Path) -> None:
    text = AutoConfig.for_model("llama")
    assert load_image_preparer(text, str(tmp_path), {}) is None
    save_tiny_vision("qwen2_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    config = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        load_image_preparer(config, str(tmp_path), {})
