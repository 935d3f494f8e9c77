"""Tiny vision-language models on disk, and the toy task of counting squares.

A tokenizer of one character per token, an image processor of 4 x 4 pixels per patch and 2 x 2
patches per token, and random weights, as `save_pretrained` writes them.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from hybridengine.vision import EncodedImage
from tests.extras.vision.vision_models import IMAGE, VIDEO, build
from tests.tiny_models import VOCAB

__all__ = [
    "FAMILIES",
    "PLACES",
    "SIDE",
    "count_rows",
    "draw_squares",
    "save_tiny_vision",
    "write_image_rows",
]

SIDE = 24  # pixels of an image, 9 tokens
_SPECIAL = {
    "<|endoftext|>": 0,
    "<|im_start|>": 1,
    "<|im_end|>": 2,
    "<|vision_start|>": VIDEO - 2,
    "<|vision_end|>": VIDEO - 1,
    "<|video_pad|>": VIDEO,
    "<|image_pad|>": IMAGE,
}
_OF_GLM = {  # vLLM looks for these names
    **{"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
    **{"<|begin_of_video|>": 3, "<|end_of_video|>": 4, "<|video|>": VIDEO, "<|image|>": IMAGE},
    **{"<|begin_of_image|>": VIDEO - 2, "<|end_of_image|>": VIDEO - 1},
}
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}
_GLM = {**_QWEN, "image_processor_type": "Glm4vImageProcessor"}
_TILES = {"size": {"height": 16, "width": 16}}
# preprocessor_config.json and processor_config.json
_PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (_QWEN, {}),
    "qwen2_5_vl": (_QWEN, {}),
    "qwen3_vl": (_QWEN, {}),
    "qwen3_vl_moe": (_QWEN, {}),
    "llava_onevision": (
        {
            **_TILES,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]],
        },
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
        | {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    ),
    "internvl": (
        {**_TILES, "image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True}
        | {"min_patches": 1, "max_patches": 4},
        {"image_seq_length": 4},
    ),
    "gemma3": (
        {**_TILES, "image_processor_type": "Gemma3ImageProcessor"},
        {"image_seq_length": 4},
    ),
    "qwen3_5": (_QWEN, {}),
    "qwen3_5_moe": (_QWEN, {}),
    "mistral3": (
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}}
        | {"patch_size": {"height": 8, "width": 8}},
        {"patch_size": 4, "spatial_merge_size": 2, "image_token": "<|image_pad|>"}
        | {"image_break_token": "<|vision_start|>", "image_end_token": "<|vision_end|>"},
    ),
    "gemma4": (
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70}
        | {"pooling_kernel_size": 2},
        {},
    ),
    "glm4v": (_GLM, {}),
    "glm4v_moe": (_GLM, {}),
    "glm46v": ({**_QWEN, "image_processor_type": "Glm46VImageProcessor"}, {}),
}
FAMILIES = tuple(_PROCESSORS)
# What the chat template writes for an image; the processor makes of it all tokens around.
PLACES = dict.fromkeys(FAMILIES, "<|vision_start|><|image_pad|><|vision_end|>")
PLACES |= dict.fromkeys(
    ("glm4v", "glm4v_moe", "glm46v"), "<|begin_of_image|><|image|><|end_of_image|>"
)
PLACES |= {"gemma3": "<|vision_start|>", "gemma4": "<|image_pad|>", "mistral3": "<|image_pad|>"}


def save_tiny_vision(kind: str, folder: Path, seed: int = 0, **text: object) -> str:
    """Write the tiny model of `kind` to `folder` and return it.

    text: entries of the language model's configuration, which change no weights.
    """
    model = build(kind, "eager", seed)
    model.config.text_config.update(text)
    model.config.vision_start_token_id = _SPECIAL["<|vision_start|>"]
    model.config.vision_end_token_id = _SPECIAL["<|vision_end|>"]
    if kind == "gemma4":
        model.config.boi_token_id, model.config.eoi_token_id = VIDEO - 2, VIDEO - 1
    if kind.startswith("qwen3"):  # what transformers' model always does, and vLLM's by the config
        model.config.text_config.rope_parameters["mrope_interleaved"] = True
    model.save_pretrained(folder)
    tokenizer(kind).save_pretrained(folder)
    for name, content in zip(("preprocessor", "processor"), _PROCESSORS[kind], strict=True):
        if content:
            (folder / f"{name}_config.json").write_text(json.dumps(content))
    return str(folder)


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """One token for each printable character of ASCII but for three."""
    special = _OF_GLM if kind.startswith("glm") else _SPECIAL
    by_id = {i: name for name, i in special.items()}
    free = [i for i in range(VOCAB) if i not in by_id]
    characters = [chr(c) for c in (*range(97, 123), *range(48, 58), *range(32, 48), *range(58, 97))]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    shown = [byte_level.pre_tokenize_str(c)[0][0] for c in characters]
    vocab = special | dict(zip(shown, free, strict=False))
    state = Tokenizer(BPE(vocab, []))
    state.pre_tokenizer, state.decoder = byte_level, decoders.ByteLevel()
    state.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(
        tokenizer_object=state,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=_TEMPLATE.replace("IMAGE", PLACES[kind]),
        extra_special_tokens={  # of the processors of Gemma, InternVL and GLM
            **dict.fromkeys(("boi_token", "start_image_token", "boa_token"), by_id[VIDEO - 2]),
            **dict.fromkeys(("eoi_token", "end_image_token", "eoa_token"), by_id[VIDEO - 1]),
            **dict.fromkeys(("image_token", "context_image_token"), by_id[IMAGE]),
            **dict.fromkeys(("video_token", "audio_token"), by_id[VIDEO]),
        },
    )


def write_image_rows(folder: Path) -> None:
    """Write `vision/`, a model, and `images.jsonl` for small GRPO and SFT jobs about text."""
    save_tiny_vision("qwen2_vl", folder / "vision")
    rows = [
        {**row, "response": "1", "reward_model": {"ground_truth": [3, 43]}}
        for row in count_rows(folder, num_rows=8)
    ]
    (folder / "images.jsonl").write_text("\n".join(map(json.dumps, rows)))


def encoded(image: Image.Image, where: str = "row 0") -> EncodedImage:
    content = BytesIO()
    image.save(content, "PNG")
    return EncodedImage.of_bytes(where, content.getvalue())


def draw_squares(count: int, seed: int = 0) -> Image.Image:
    """Draw `count` white squares at random places of a 3 x 3 grid on black."""
    generator = torch.Generator().manual_seed(seed)
    image, cell = Image.new("RGB", (SIDE, SIDE)), SIDE // 3
    draw = ImageDraw.Draw(image)
    for place in torch.randperm(9, generator=generator)[:count].tolist():
        x, y = place % 3 * cell, place // 3 * cell
        draw.rectangle((x + 1, y + 1, x + cell - 2, y + cell - 2), "white")
    return image


def count_rows(folder: Path, num_rows: int, num_texts: int = 0) -> list[dict[str, Any]]:
    """Write images to `folder`; return rows about them in verl's schema, and rows of text alone."""
    rows: list[dict[str, Any]] = []
    for k in range(num_rows):
        count = 1 + k % 4
        draw_squares(count, k).save(folder / f"{k}.png")
        rows.append(
            {
                "data_source": "squares",
                "prompt": [{"role": "user", "content": "<image>?"}],
                "images": [{"path": f"{k}.png"}],
                "reward_model": {"ground_truth": str(count)},
            }
        )
    for k in range(num_texts):
        rows.append(
            {
                "data_source": "text",
                "prompt": [{"role": "user", "content": f"say {1 + k % 4}"}],
                "images": None,
                "reward_model": {"ground_truth": str(1 + k % 4)},
            }
        )
    return rows
