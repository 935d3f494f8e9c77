"""Draw squares to count, and make a tiny Qwen2-VL with random weights and its processor.

    python examples/vision/prepare.py        # writes model, train.parquet, test.parquet

The rows are in verl's schema (prompt, images, reward_model) with a column of chats for SFT as well.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

FOLDER = Path(".cache/vision")
SIDE, CELLS, MOST = 48, 4, 6  # pixels, cells of the grid in a row, squares
SPECIAL = [
    "<|endoftext|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|video_pad|>",
    "<|image_pad|>",
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 6,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def squares(count: int, rng: random.Random) -> bytes:
    """Draw squares of random colours in random cells; return a PNG."""
    image, cell = Image.new("RGB", (SIDE, SIDE)), SIDE // CELLS
    draw = ImageDraw.Draw(image)
    for place in rng.sample(range(CELLS * CELLS), count):
        x, y = place % CELLS * cell, place // CELLS * cell
        colour = tuple(rng.randrange(128, 256) for _ in range(3))
        draw.rectangle((x + 2, y + 2, x + cell - 3, y + cell - 3), colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def rows(number: int, seed: int) -> list[dict[str, Any]]:
    rng, made = random.Random(seed), list[dict[str, Any]]()
    for _ in range(number):
        count = rng.randint(1, MOST)
        question = {"role": "user", "content": "<image>How many?"}
        made.append(
            {
                "data_source": "squares",
                "prompt": [question],
                "messages": [question, {"role": "assistant", "content": str(count)}],
                "images": [{"bytes": squares(count, rng), "path": None}],
                "reward_model": {"style": "rule", "ground_truth": str(count)},
            }
        )
    return made


def save_model(folder: Path) -> None:
    """A byte-level tokenizer without merges, the processor, and random weights."""
    vocab = {
        text: i for i, text in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    state = Tokenizer(BPE(vocab, []))
    state.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    state.decoder = decoders.ByteLevel()
    state.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(
        tokenizer_object=state,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    config = Qwen2VLConfig(
        text_config=dict(
            vocab_size=len(vocab),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
            rope_parameters={"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
            tie_word_embeddings=True,
        ),
        vision_config=dict(
            depth=2,
            embed_dim=64,
            hidden_size=128,
            num_heads=2,
            mlp_ratio=2,
            patch_size=PROCESSOR["patch_size"],
        ),
        vision_start_token_id=2,
        vision_end_token_id=3,
        video_token_id=4,
        image_token_id=5,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_model(FOLDER / "model")
    for name, number, seed in (("train", 2048, 1), ("test", 128, 2)):
        pq.write_table(pa.Table.from_pylist(rows(number, seed)), FOLDER / f"{name}.parquet")
    print(f"wrote {FOLDER}/model, train.parquet and test.parquet")


if __name__ == "__main__":
    main()
