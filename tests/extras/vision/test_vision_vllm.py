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
@pytest.mark.parametrize(
    "kind",
    [
        "qwen2_vl",
        *(
            pytest.param(kind, marks=pytest.mark.exhaustive)
            for kind in ("qwen3_5", "qwen3_5_moe", "mistral3", "gemma4", "glm4v", "glm4v_moe")
        ),
    ],
)
def test_vllm_and_trainer_agree(tmp_path: Path, kind: str) -> None:
    """Every step has the same images, and updates the tower: vLLM keeps no features of old ones."""
    text = {"use_bidirectional_attention": None} if kind == "gemma4" else {}  # as of its E2B
    is_hybrid = kind.startswith("qwen3_5")  # whose recurrence vLLM computes in bfloat16 on a CPU
    options = {"rollout.dtype": "bfloat16"} if is_hybrid else {}
    job = vision_job(tmp_path, kind, text, **options)
    check_steps(run_vllm(tmp_path, job), kind, 0.1 if is_hybrid else 1e-4)


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
