"""Tiny random vision-language models of every family that packs images, and their images."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig

from hybridengine.model.attention import attention_of
from hybridengine.model.extensions import prepare_model
from hybridengine.vision.formats import ImageFormat, ImageInputs
from tests.tiny_models import SIZES, VOCAB

IMAGE, VIDEO, BREAK = VOCAB - 1, VOCAB - 2, VOCAB - 3

_TEXT = {name: x for name, x in SIZES.items() if name != "head_dim"} | {"initializer_range": 0.1}
_MROPE = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
}
_QWEN_VISION = dict(
    **dict(depth=3, embed_dim=64, num_heads=4, in_channels=3, patch_size=4, mlp_ratio=2),
    **dict(spatial_merge_size=2, temporal_patch_size=2, initializer_range=0.1),
)
_VIT = dict(
    **dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4),
    **dict(image_size=16, patch_size=4, initializer_range=0.1),
)
_QWEN3_VISION = (
    _QWEN_VISION
    | dict(hidden_size=64, intermediate_size=96, out_hidden_size=128)
    | dict(num_position_embeddings=16)
)
_LINEAR = dict(
    **dict(linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=64),
    **dict(linear_value_head_dim=64, layer_types=["linear_attention", "full_attention"]),
    rope_parameters=dict(
        **dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
        **dict(mrope_section=[4, 2, 2], mrope_interleaved=True),
    ),
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
_GLM = _TEXT | {
    "attention_bias": True,  # of published configs; vLLM reads it
    "rope_parameters": dict(
        **dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
        mrope_section=[2, 3, 3],
    ),
}
_GLM_VISION = dict(
    **dict(depth=2, hidden_size=64, num_heads=4, in_channels=3, image_size=16, patch_size=4),
    **dict(spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=128),
    **dict(intermediate_size=96, initializer_range=0.1),
)
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": _TEXT | _MROPE,
        "vision_config": _QWEN_VISION | {"hidden_size": 128},
    },
    "qwen2_5_vl": {
        "text_config": _TEXT | _MROPE,
        "vision_config": _QWEN_VISION
        | dict(hidden_size=64, intermediate_size=96, out_hidden_size=128)
        | dict(window_size=16, fullatt_block_indexes=[1]),
    },
    "qwen3_vl": {
        "text_config": _TEXT | _MROPE | {"head_dim": 32},
        "vision_config": _QWEN3_VISION | dict(deepstack_visual_indexes=[0, 1]),
    },
    "qwen3_vl_moe": {
        "text_config": _TEXT
        | _MROPE
        # Saved transposed, which transformers does not undo for a square gate_up_proj.
        | _EXPERTS
        | {"head_dim": 32, "norm_topk_prob": True},  # of published configs; vLLM reads it
        "vision_config": _QWEN3_VISION | dict(deepstack_visual_indexes=[0, 1]),
    },
    "llava_onevision": {
        "text_config": {"model_type": "qwen2"} | _TEXT,
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False} | _VIT,
        "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]],
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
        "vision_aspect_ratio": "anyres_max_9",
    },
    "internvl": {
        "text_config": {"model_type": "qwen2"} | _TEXT,
        "vision_config": {**_VIT, "image_size": [16, 16], "patch_size": [4, 4]},
        "downsample_ratio": 0.5,
    },
    "gemma3": {
        "text_config": _TEXT
        | dict(head_dim=32, query_pre_attn_scalar=32, num_hidden_layers=3, sliding_window=6)
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": {"vision_use_head": False} | _VIT,
        "mm_tokens_per_image": 4,
    },
    "qwen3_5": {
        "text_config": _TEXT | _LINEAR | {"head_dim": 32},
        "vision_config": _QWEN3_VISION,
    },
    "qwen3_5_moe": {
        "text_config": _TEXT
        | _LINEAR
        | _EXPERTS
        | {"head_dim": 32, "shared_expert_intermediate_size": 64},
        "vision_config": _QWEN3_VISION,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "head_dim": 32} | _TEXT,
        "vision_config": {"model_type": "pixtral", "num_channels": 3} | _VIT,
    },
    "gemma4": {
        "text_config": _TEXT
        | dict(head_dim=32, global_head_dim=32, num_hidden_layers=4, sliding_window=6)
        | dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=16)
        | dict(num_kv_shared_layers=2, use_bidirectional_attention="vision")
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        "vision_config": {k: x for k, x in _VIT.items() if k != "image_size"}
        | dict(head_dim=16, num_key_value_heads=4, pooling_kernel_size=2)
        | dict(position_embedding_size=64, default_output_length=70),
    },
    "glm4v": {"text_config": _GLM, "vision_config": _GLM_VISION},
    "glm46v": {"text_config": _GLM, "vision_config": _GLM_VISION},
    "glm4v_moe": {
        "text_config": _GLM
        | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
        | dict(n_group=1, topk_group=1, head_dim=32, use_qk_norm=False),
        "vision_config": _GLM_VISION,
    },
}


def vision_config(kind: str, tie: bool = False) -> PretrainedConfig:
    config = AutoConfig.for_model(
        kind, image_token_id=IMAGE, video_token_id=VIDEO, **copy.deepcopy(VISION[kind])
    )
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = tie
    return config


def build(kind: str, attention: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(
            vision_config(kind), attn_implementation=attention
        )
        for name, parameter in model.named_parameters():
            if "A_log" in name:  # decays slow enough that a state of another sequence shows
                parameter.data.uniform_(-2, 0)
            # Of Gemma, they begin at zero.
            elif parameter.ndim == 1 or "mm_input_projection" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def vision_models(kind: str) -> tuple[Any, Any]:
    """Two models with the same random weights: packed attention, and transformers' eager."""
    eager = build(kind, "eager")
    packed = build(kind, attention_of(vision_config(kind)))
    packed.load_state_dict(eager.state_dict())
    prepare_model(packed)
    return packed, eager


def save_vision(kind: str, folder: Path | str) -> str:
    """Write a tiny model to `folder` and return `folder` as str."""
    build(kind, "eager").save_pretrained(folder)
    return str(folder)


def image(kind: str, height: int, width: int, seed: int = 0) -> ImageInputs:
    """A random image of height x width merged patches, or tiles of 16 pixels."""
    generator = torch.Generator().manual_seed(seed)
    key = f"{height}x{width}-{seed}"
    if kind.startswith(("qwen", "glm")):
        pixels = torch.randn(4 * height * width, 3 * 2 * 4 * 4, generator=generator)
        grid = torch.tensor([[1, 2 * height, 2 * width]])
        return ImageInputs(key, height * width, {"pixel_values": pixels, "image_grid_thw": grid})
    if kind == "mistral3":
        pixels = torch.randn(1, 3, 8 * height, 8 * width, generator=generator)
        tensors = {"pixel_values": pixels, "image_sizes": torch.tensor([[8 * height, 8 * width]])}
        return ImageInputs(key, height * width, tensors, num_rows=height)
    if kind == "gemma4":  # up to six tokens; places beyond the image are -1
        pixels, places = torch.zeros(1, 24, 48), torch.full((1, 24, 2), -1)
        grid = torch.meshgrid(torch.arange(2 * height), torch.arange(2 * width), indexing="ij")
        number = 4 * height * width
        pixels[0, :number] = torch.rand(number, 48, generator=generator)
        places[0, :number] = torch.stack(grid[::-1], -1).flatten(0, 1)
        tensors = {"pixel_values": pixels, "image_position_ids": places}
        return ImageInputs(key, height * width, tensors)
    tiles = height * width
    if kind == "gemma3":
        pixels = torch.randn(1, 3, 16, 16, generator=generator)
        return ImageInputs(key, 4, {"pixel_values": pixels})
    if kind == "internvl":
        pixels = torch.randn(tiles, 3, 16, 16, generator=generator)
        return ImageInputs(key, 4 * tiles, {"pixel_values": pixels})
    pixels = torch.randn(1 + tiles, 3, 16, 16, generator=generator)
    sizes = torch.tensor([[16 * height, 16 * width]])
    num_tokens = 16 + 4 * height * (4 * width + 1)
    return ImageInputs(key, num_tokens, {"pixel_values": pixels, "image_sizes": sizes})


def tokens_of(picture: ImageInputs) -> list[int]:
    """The tokens of an image in a sequence."""
    ids = torch.full((int(picture.offsets[-1]) + 1,), BREAK)
    ids[picture.offsets] = IMAGE
    return ids.tolist()


def cases(kind: str, seed: int = 0) -> tuple[list, list[list[ImageInputs]]]:
    """(prompt, response) pairs and their images.

    A group of one prompt, the same tokens with another image, an image in a response as a tool
    returns it, two images without text between them, and text alone.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(3, VIDEO, (n,), generator=generator).tolist()

    a, b, c = image(kind, 2, 1, 1), image(kind, 2, 1, 2), image(kind, 1, 2, 3)
    run, other = tokens_of(a), tokens_of(c)
    prompt = [*ids(3), *run, *ids(4)]
    # transformers' M-RoPE takes a run for one image, and so does its attention in both directions
    between = [] if kind in ("internvl", "mistral3") else ids(1)
    return [
        (prompt, ids(4)),
        (ids(5), ids(3)),
        (prompt, ids(6)),
        (prompt, ids(2)),
        ([*ids(2), *run, *between, *other, *ids(2)], ids(3)),
        (prompt, [*ids(2), *other, *ids(3)]),
    ], [[a], [], [b], [a], [a, c], [a, c]]


def alone(model: Any, ids: list[int], images: list[ImageInputs]) -> torch.Tensor:
    """Logits [l, V] of one sequence by transformers' own forward."""
    options = {}
    if images:
        image_format = ImageFormat(model.config)
        options = image_format.join(images)
        options |= image_format.token_types(torch.tensor([ids]) == IMAGE)
    return model(input_ids=torch.tensor([ids]), use_cache=False, **options).logits[0]
