"""Images through a vLLM server: the trainer's tokens are the server's, checked in every answer."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoConfig

from hybridengine.engine.interface import Prompt
from hybridengine.remote.servers.images import ServerPrompt, check_image_settings
from hybridengine.run.errors import RolloutError
from hybridengine.vision import EncodedImage, ImagePreparer, load_image_preparer
from hybridengine.vision.decoding import decode_image
from tests.extras.remote.overlapped import run_overlapped
from tests.extras.remote.vllm_server import START_S, serving
from tests.extras.vision.tiny_vision import draw_squares, save_tiny_vision
from tests.extras.vision.vision_jobs import check_steps, vision_job
from tests.extras.vision.vision_models import IMAGE


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(START_S + 300)
def test_a_server_and_the_trainer_agree(tmp_path: Path) -> None:
    """Every step has the same images, and updates the tower: the server keeps no old features."""
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    job = vision_job(tmp_path)
    with serving(str(tmp_path / "model"), 1, tmp_path, images=True) as server:
        served = ("rollout.name=auto", f"rollout.servers=[{server.url}]", "rollout.max_num_seqs=8")
        [result] = run_overlapped(tmp_path, [[*job, *served]], num_ranks=2)
        with pytest.raises(RolloutError, match=r"--mm-processor-kwargs \{\}, and data\.mm"):
            server.check_images({"max_pixels": 256})
    check_steps(result)


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> ImagePreparer:
    path = save_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("model"))
    loaded = load_image_preparer(AutoConfig.from_pretrained(path), path, {})
    assert loaded is not None
    return loaded


def picture(count: int) -> EncodedImage:
    content = BytesIO()
    draw_squares(count).save(content, "WEBP", lossless=True)
    return EncodedImage.of_bytes(f"row {count}", content.getvalue())


def test_a_server_gets_one_placeholder_and_the_pixels_of_each_image(
    preparer: ImagePreparer,
) -> None:
    images, ids = [picture(2), picture(3)], [5, *[IMAGE] * 9, 6, *[IMAGE] * 9, 7]
    prompt = ServerPrompt.of(Prompt(ids, images), preparer)
    assert prompt.ranges == ((1, 9), (11, 9))
    request = prompt.request()
    assert request["token_ids"] == [5, IMAGE, 6, IMAGE, 7] and request["return_token_ids"]
    for part, image in zip(request["content_parts"], images, strict=True):
        data = base64.b64decode(part["url"].removeprefix("data:image/png;base64,"))
        assert Image.open(BytesIO(data)).tobytes() == decode_image(image).tobytes()
        assert part["uuid"] == preparer.key(image)
    assert ServerPrompt.of(Prompt([5, 6]), preparer).request() == {"token_ids": [5, 6]}
    with pytest.raises(RolloutError, match="row 2: the model has sampled the image token 100"):
        ServerPrompt.of(Prompt([*ids, IMAGE], images), preparer)


def test_answers_with_other_tokens_are_refused(preparer: ImagePreparer) -> None:
    ids = [5, *[IMAGE] * 9, 7]
    prompt = ServerPrompt.of(Prompt(ids, [picture(2)]), preparer)

    def answer(read: list[int], start: int) -> dict[str, Any]:
        places = {"image": [{"offset": start, "length": 9}]}
        return {"prompt_token_ids": read, "mm_placeholders": places}

    prompt.check("server a", answer(ids, 1))
    with pytest.raises(RolloutError, match=r"server a has read other tokens .* at position 10"):
        prompt.check("server a", answer([5, *[IMAGE] * 10, 7], 1))
    with pytest.raises(RolloutError, match=r"server a has read images at \[\(0, 9\)\]"):
        prompt.check("server a", answer(ids, 0))
    ServerPrompt.of(Prompt([5]), preparer).check("server a", {})


def test_a_server_that_prepares_images_otherwise_is_refused() -> None:
    check_image_settings("server a", {"multimodal_config": {"mm_processor_kwargs": None}}, {})
    options = {"max_pixels": 256}
    check_image_settings(
        "server a", {"multimodal_config": {"mm_processor_kwargs": options}}, options
    )
    with pytest.raises(RolloutError, match=r"server a has --mm-processor-kwargs \{\}, and data"):
        check_image_settings("server a", {"multimodal_config": {}}, options)
    with pytest.raises(RolloutError, match="start it with --no-mm-device-do-normalize"):
        config = {"multimodal_config": {"mm_device_do_normalize": True}}
        check_image_settings("server a", config, {})
