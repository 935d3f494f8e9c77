"""Images through vLLM: log-probs of engine and trainer agree, and other tokens are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from hybridengine.run.errors import RolloutError
from hybridengine.vision import EncodedImage, load_image_preparer
from tests.extras.vision.tiny_vision import draw_squares, encoded, save_tiny_vision
from tests.extras.vision.vision_jobs import check_steps, run_vllm, vision_job

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


@pytest.mark.slow
@pytest.mark.multirank
def test_vllm_and_trainer_agree(tmp_path: Path) -> None:
    """Every step has the same images, and updates the tower: vLLM keeps no features of old ones."""
    check_steps(run_vllm(tmp_path, vision_job(tmp_path)))


def _place(start: int, tokens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(start_idx=start, length=len(tokens), tokens=tokens)


@pytest.mark.parametrize(
    ("ids", "found", "message"),
    [
        ([5, 97, 100, 100, 98], [_place(2, [100, 100])], None),
        ([100, 97, 100, 100, 98], [_place(2, [100, 100])], None),  # the first one was sampled
        ([5, 97, 100, 98], [], r"row 3: vLLM .* to 2 image tokens.* has 1 from position 2 on"),
        (
            [5, 97, 100, 100, 100, 98],
            [_place(2, [100, 100])],
            r"row 3: vLLM .* to 2 image tokens.* has 3 from position 2 on",
        ),
        ([5, 6], [], r"row 3: vLLM .* to 2 image tokens.* has 0 from position 2 on"),
    ],
)
def test_other_tokens_than_vllm_would_write_are_refused(
    tmp_path: Path, ids: list[int], found: list[SimpleNamespace], message: str | None
) -> None:
    """vLLM's processor, whose expansion of the image is two image tokens, is a stand-in."""
    from hybridengine.vision.engine import PromptImages

    save_tiny_vision("qwen2_vl", tmp_path)
    preparer = load_image_preparer(AutoConfig.from_pretrained(tmp_path), str(tmp_path), {})
    assert preparer is not None
    image = encoded(draw_squares(1), "row 3")
    key = preparer.key(image)
    processor = SimpleNamespace(
        _validate_mm_kwargs=lambda *_: None,
        _validate_mm_updates=lambda *_: None,
        _find_mm_placeholders=lambda *_: {"image": found} if found else {},
    )
    prompts = PromptImages(
        preparer.image_format, preparer.key, SimpleNamespace(get_mm_processor=lambda: processor)
    )
    prompts.prompt(ids, [image])
    update = SimpleNamespace(content=SimpleNamespace(full=[100, 100]))
    result = SimpleNamespace(
        prompt_ids=ids, kwargs={}, prompt_updates={"image": [[update]]}, hashes={"image": [key]}
    )
    items = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    if message is None:
        assert processor._maybe_apply_prompt_updates(items, result)[0] == ids
        return
    with pytest.raises(RolloutError, match=message):
        processor._maybe_apply_prompt_updates(items, result)


def test_images_that_attend_in_both_directions_are_refused_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridengine.vision.engine import PromptImages

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    save_tiny_vision("gemma3", tmp_path)
    preparer = load_image_preparer(AutoConfig.from_pretrained(tmp_path), str(tmp_path), {})
    processor = SimpleNamespace()
    prompts = PromptImages(
        preparer.image_format, preparer.key, SimpleNamespace(get_mm_processor=lambda: processor)
    )
    assert prompts.prompt([5, 6], []) == {"prompt_token_ids": [5, 6]}
    with pytest.raises(RolloutError, match="row 3: vLLM's attention on CPUs is causal"):
        prompts.prompt([5, 6], [EncodedImage("row 3", "abc")])


def test_a_prompt_that_vllm_has_read_otherwise_is_refused() -> None:
    from hybridengine.engine.interface import check_prompt

    check_prompt("vLLM", [1, 2, 3], [1, 2, 3])
    for other, position in (([1, 4, 3], 1), ([1, 2, 3, 4], 3), ([1], 1)):
        with pytest.raises(RolloutError, match=f"difference is at position {position}"):
            check_prompt("vLLM", other, [1, 2, 3])
