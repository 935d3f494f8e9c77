"""Forward and backward of a group of responses to one prompt with an image, which is encoded once.

A model with the widths of Qwen2-VL-2B, two layers of the tower and of the language model each and a
smaller vocabulary, with random weights; one process. `hybridengine` packs the
prompt and its image once for its responses, "plain packing" each response with its own copy, and
"padded" is transformers' own forward of a padded batch, with logits of all tokens. Log-probs and
their backward; nothing is recomputed. The limit is the token ratio of the language model, as in
`shared_prefix`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText, Qwen2VLConfig

from benchmarks._bench import OURS, Bench
from benchmarks.shared_prefix import compare, rollouts, training
from hybridengine.model import pack_rollouts
from hybridengine.model.head import patch_head
from hybridengine.model.loading import attention_of
from hybridengine.vision.formats import ImageFormat, ImageInputs
from hybridengine.vision.packed import SequenceImages

# Responses, side of the image in placeholders, tokens of a prompt's text and of a response.
SHAPES = {"8x(8x8 image+16+32)": (8, 8, 16, 32)}
QUICK = {"3x(2x2 image+4+4)": (3, 2, 4, 4)}
IMAGE = 0


def run(bench: Bench) -> None:
    model, padded_model = (build(bench, attention) for attention in (True, False))
    padded_model.load_state_dict(model.state_dict(), assign=True)
    patch_head(model)
    image_format = ImageFormat(model.config)
    for shape, (responses, side, text, length) in (QUICK if bench.quick else SHAPES).items():
        image = random_image(model.config, side)
        vocab_size = model.config.text_config.vocab_size
        pairs = [  # the placeholder is not among the tokens of text
            ([IMAGE] * image.num_tokens + [1 + t for t in prompt], [1 + t for t in response])
            for prompt, response in rollouts(vocab_size - 1, 1, responses, text, length)
        ]
        parts = {"images": SequenceImages([[image]] * responses, image_format)}
        plain, shared = (
            pack_rollouts(pairs, bench.device, shared_prefix=share, parts=parts)
            for share in (False, True)
        )
        padded = pad(pairs, image, bench.device)
        calls: dict[str, Callable[[], None]] = {
            OURS: partial(training, model, shared),
            "plain packing": partial(training, model, plain),
            "padded": partial(train_padded, padded_model, padded, length),
        }
        ratio = plain.input_ids.numel() / shared.input_ids.numel()
        print(f"# {shape}: token ratio {ratio:.2f}, image ratio {responses}", flush=True)
        compare(bench, "images", "training", shape, torch.float32, calls, ratio)


def build(bench: Bench, packed: bool) -> Any:
    """Return the model in float32 with packed attention, or transformers' sdpa."""
    text = dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=2, vocab_size=16_000)
    text |= dict(num_attention_heads=12, num_key_value_heads=2)
    vision = dict(depth=2, embed_dim=1280, hidden_size=1536, num_heads=16)
    sections = [16, 24, 24]
    if bench.quick:
        text |= dict(hidden_size=64, intermediate_size=96, num_attention_heads=2, vocab_size=200)
        vision |= dict(embed_dim=32, hidden_size=64, num_heads=2)
        sections = [4, 6, 6]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    config = Qwen2VLConfig(
        text_config=text | {"rope_parameters": rope, "tie_word_embeddings": True},
        vision_config=vision,
        image_token_id=IMAGE,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    attention: Any = attention_of(config) if packed else "sdpa"
    model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
    return model.to(bench.device)


def random_image(config: Any, side: int) -> ImageInputs:
    vision = config.vision_config
    patches = side * vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(patches**2, width, generator=generator)
    grid = torch.tensor([[1, patches, patches]])
    return ImageInputs("", side**2, {"pixel_values": pixels, "image_grid_thw": grid})


def pad(
    pairs: list[tuple[list[int], list[int]]], image: ImageInputs, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' forward for a batch of sequences of equal lengths."""
    ids = pad_sequence([torch.tensor(p + r) for p, r in pairs], batch_first=True)
    arguments = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        **{name: x.repeat(len(pairs), 1) for name, x in image.tensors.items()},
    }
    return {name: x.to(device) for name, x in arguments.items()}


def train_padded(model: Any, arguments: dict[str, torch.Tensor], length: int) -> None:
    """Forward and backward of the log-probs of the last `length` tokens of each sequence."""
    logits = model(**arguments, use_cache=False).logits[:, -length - 1 : -1].float()
    targets = arguments["input_ids"][:, -length:, None]
    logits.log_softmax(-1).gather(2, targets).mean().backward()
    model.zero_grad()
