"""How each family of models takes images: its placeholders, tensors and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hybridengine.run.errors import ModelError


@dataclass(frozen=True)
class ImageInputs:
    """One image of a sequence, as the model's processor prepared it.

    key: hash of the image and of how it was prepared. Equal prefixes with other images differ.
    num_tokens: of its placeholders in the sequence, of the model's image token.
    tensors: by the names of the model's forward arguments (`pixel_values`, `image_grid_thw`), with
      the image's rows alone.
    num_rows: runs of equal length that the placeholders are in, with one other token between two.
    """

    key: str
    num_tokens: int
    tensors: Mapping[str, Tensor]
    num_rows: int = 1

    @property
    def offsets(self) -> Tensor:
        """Where its placeholders are after the first, int64 [num_tokens]."""
        index = torch.arange(self.num_tokens)
        return index + index // (self.num_tokens // self.num_rows)


class ImageFamily(NamedTuple):
    """How models of one `model_type` take images.

    tensors: names of the arguments of their forward.
    has_mrope: positions have three components, by `image_grid_thw`.
    is_bidirectional: tokens of an image attend to each other in both directions.
    in_windows: they do so only in layers with a sliding window, and only where the config of the
      language model has use_bidirectional_attention "vision".
    has_rows: the processor writes another token after each row of an image.
    is_framed: the processor replaces a placeholder by more than its own repetition.
    token_types: the argument of transformers' forward that marks tokens of images, if it has one.
    """

    tensors: tuple[str, ...]
    has_mrope: bool = False
    is_bidirectional: bool = False
    in_windows: bool = False
    has_rows: bool = False
    is_framed: bool = False
    token_types: str | None = None


_QWEN = ImageFamily(
    ("pixel_values", "image_grid_thw"), has_mrope=True, token_types="mm_token_type_ids"
)
_FAMILIES = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "glm4v": _QWEN,
    "glm4v_moe": _QWEN,
    "glm46v": _QWEN,
    "llava_onevision": ImageFamily(("pixel_values", "image_sizes")),
    "internvl": ImageFamily(("pixel_values",), is_framed=True),
    "gemma3": ImageFamily(
        ("pixel_values",), is_bidirectional=True, is_framed=True, token_types="token_type_ids"
    ),
    "gemma4": ImageFamily(
        ("pixel_values", "image_position_ids"),
        is_bidirectional=True,
        in_windows=True,
        is_framed=True,
        token_types="mm_token_type_ids",
    ),
    "mistral3": ImageFamily(("pixel_values", "image_sizes"), has_rows=True, is_framed=True),
}
IMAGE_MODEL_TYPES = tuple(_FAMILIES)


@dataclass(frozen=True)
class ImageFormat:
    """How the model of `config` takes images.

    Raises:
        ModelError: the model takes no images, or images of its family cannot be packed.
    """

    config: PretrainedConfig

    def __post_init__(self) -> None:
        if (kind := self.config.model_type) not in _FAMILIES:
            raise ModelError(
                f"images for a model of type {kind!r}, expected one of {list(_FAMILIES)}"
            )

    @property
    def token_id(self) -> int:
        """The placeholder."""
        return int(self.config.image_token_id)

    def token_types(self, is_image: Tensor) -> dict[str, Tensor]:
        """Return what transformers' own forward needs of `is_image` (bool), as an argument."""
        name = self.family.token_types
        return {} if name is None else {name: is_image.long()}

    @property
    def family(self) -> ImageFamily:
        """How models of its type take images."""
        return _FAMILIES[self.config.model_type]

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens of an image attend to each other in both directions, in some layers."""
        if not self.family.in_windows:
            return self.family.is_bidirectional
        return self.config.get_text_config().use_bidirectional_attention == "vision"

    def find(self, ids: Tensor, images: Sequence[ImageInputs], sequence: int) -> list[int]:
        """Return where the placeholders of each of `images` begin in the token ids [l].

        A run of the placeholder token belongs to the next images whose tokens it holds exactly, and
        so do runs with one token between two to an image of several rows; any other run is text.

        Raises:
            ModelError: an image without placeholders, or without a tensor that the model needs; the
                message names `sequence`.
        """
        for image in images:
            if missing := [name for name in self.family.tensors if name not in image.tensors]:
                raise ModelError(
                    f"sequence {sequence}: an image has the tensors {sorted(image.tensors)}, but a "
                    f"model of type {self.config.model_type!r} needs {missing[0]!r}"
                )
        is_token = ids == self.token_id
        changes = nn.functional.pad(is_token.int(), (1, 1)).diff()
        begins, ends = ((changes == sign).nonzero().flatten().tolist() for sign in (1, -1))
        starts: list[int] = []
        end = 0
        for begin in begins:
            if begin < end:  # a further row of an image
                continue
            edges = [begin]
            for image in images[len(starts) :]:
                edges.append(edges[-1] + int(image.offsets[-1]) + 1)
                found = is_token[edges[-2] : edges[-1]].nonzero().flatten()
                if not torch.equal(found, image.offsets):
                    break
                if edges[-1] in ends:
                    starts += edges[:-1]
                    end = edges[-1]
                    break
        if len(starts) < len(images):
            runs = [end - begin for begin, end in zip(begins, ends, strict=True)]
            raise ModelError(
                f"sequence {sequence} has runs of {runs} tokens of the image token "
                f"{self.token_id}, but its images need {[image.num_tokens for image in images]}; "
                "expand one placeholder per image to the number of its tokens, and keep the images "
                "of each sequence in their order"
            )
        return starts

    def mark(self, ids: Tensor, images: Sequence[ImageInputs], sequence: int) -> Tensor:
        """Return which of the token ids [l] are placeholders of `images`, bool [l].

        Raises ModelError as `find`.
        """
        is_image = torch.zeros_like(ids, dtype=torch.bool)
        for image, start in zip(images, self.find(ids, images, sequence), strict=True):
            is_image[start + image.offsets] = True
        return is_image

    def join(self, images: Sequence[ImageInputs]) -> dict[str, Tensor]:
        """Return the arguments of the model's forward for `images`."""
        return {
            # Processors that cut images into tiles return them as [1, tiles, 3, H, W].
            name: _cat([x.flatten(0, 1) if x.ndim == 5 else x for x in tensors])
            for name in self.family.tensors
            if (tensors := [image.tensors[name] for image in images])
        }

    def rope_position_ids(
        self, length: int, images: Sequence[ImageInputs], starts: Sequence[int]
    ) -> Tensor | None:
        """Return the M-RoPE positions of a sequence, int64 [3, length]; None without M-RoPE.

        starts: of each image's placeholders. After an image of h x w placeholders, the text goes on
        max(h, w) positions after the image's first (Wang et al. 2024, arXiv 2409.12191, 2.1).
        """
        if not self.family.has_mrope:
            return None
        merge_size = self.config.vision_config.spatial_merge_size
        positions = torch.arange(length).repeat(3, 1)
        for image, start in zip(images, starts, strict=True):
            frames, *sides = image.tensors["image_grid_thw"].flatten().tolist()
            height, width = (side // merge_size for side in sides)
            if frames * height * width != image.num_tokens:
                raise ModelError(
                    f"an image has num_tokens {image.num_tokens}, but its image_grid_thw "
                    f"{[frames, *sides]} makes {frames * height * width} placeholders"
                )
            first, end = int(positions[0, start]), start + image.num_tokens
            axes = torch.arange(frames), torch.arange(height), torch.arange(width)
            grid = torch.stack(torch.meshgrid(*axes, indexing="ij"))
            positions[:, start:end] = first + grid.flatten(1)
            positions[:, end:] = first + max(height, width) + torch.arange(length - end)
        return positions

    def dummy(self) -> ImageInputs:
        """Return a smallest image, of zeros."""
        vision = self.config.vision_config
        if self.family.has_mrope:
            merge = vision.spatial_merge_size
            channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
            width = channels * vision.temporal_patch_size * vision.patch_size**2
            tensors = {
                "pixel_values": torch.zeros(merge**2, width),
                "image_grid_thw": torch.tensor([[1, merge, merge]]),
            }
            return ImageInputs("", 1, tensors)
        if "image_position_ids" in self.family.tensors:
            axis = torch.arange(vision.pooling_kernel_size)
            places = torch.cartesian_prod(axis, axis)
            pixels = torch.zeros(1, len(places), 3 * vision.patch_size**2)
            tensors = {"pixel_values": pixels, "image_position_ids": places[None]}
            return ImageInputs("", 1, tensors)
        if self.family.has_rows:
            size = vision.patch_size * self.config.spatial_merge_size
            sizes, pixels = torch.tensor([[size, 2 * size]]), torch.zeros(1, 3, size, 2 * size)
            # Mistral 3 of transformers fails for one token alone.
            return ImageInputs("", 2, {"pixel_values": pixels, "image_sizes": sizes})
        size, patch = (
            x if isinstance(x, int) else x[0] for x in (vision.image_size, vision.patch_size)
        )
        side = size // patch
        num_tokens = round((side * getattr(self.config, "downsample_ratio", 1)) ** 2)
        num_tokens = getattr(self.config, "mm_tokens_per_image", num_tokens)  # Gemma 3
        tiles, tensors = 1, {}
        if "image_sizes" in self.family.tensors:  # the tiles of the image, after a thumbnail
            height, width = min(self.config.image_grid_pinpoints, key=lambda hw: hw[0] * hw[1])
            rows, columns = height // size, width // size
            tiles += rows * columns
            num_tokens += rows * side * (columns * side + 1)  # a newline after each row
            tensors["image_sizes"] = torch.tensor([[height, width]])
        tensors["pixel_values"] = torch.zeros(tiles, 3, size, size)
        return ImageInputs("", num_tokens, tensors)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate; images of other sizes [n, 3, H, W] get rows and columns of zeros at the end."""
    height, width = (max(x.shape[dim] for x in tensors) for dim in (-2, -1))
    if any(x.ndim == 4 and x.shape[-2:] != (height, width) for x in tensors):
        pads = [(0, width - x.shape[-1], 0, height - x.shape[-2]) for x in tensors]
        tensors = [nn.functional.pad(x, pad) for x, pad in zip(tensors, pads, strict=True)]
    return torch.cat([*tensors])


def check_vision_tower(config: PretrainedConfig, key: str = "freeze_vision_tower") -> None:
    """Raise ModelError if the model of `config` has no vision tower; key: that needs it."""
    if config.model_type not in _FAMILIES:
        raise ModelError(
            f"{key}: a model of type {config.model_type!r} has no vision tower; leave it out, or, "
            "of a language model inside a vision-language model, set model.keep_vision_tower=true"
        )


def freeze_vision_tower(model: Any) -> None:
    """Exclude the vision tower from training, before `model` is sharded.

    A projector outside of the tower (LLaVA-OneVision, InternVL, Gemma 3) stays trained. Raises
    ModelError for a model without a tower.
    """
    check_vision_tower(model.config)
    model.get_encoder(modality="image").requires_grad_(False)
