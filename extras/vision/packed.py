"""Images as inputs of a packed forward pass.

An image is a run of the model's placeholder token in the token ids of its sequence; the model
replaces their embeddings by the features that its vision tower computes. Two things differ from
transformers' own forward pass of a padded batch:

- Placeholders are those of the given images. A token of that id which the model itself has sampled
  is text, as in the rollout engine.
- A batch without images still runs the tower, on a dummy image of no sequence, if it is packed with
  an `ImageFormat`. So all ranks take part in the collectives of the tower's FSDP2 groups, and
  results do not depend on which rank has the images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hybridengine.model.attention import BidirectionalSpan
from hybridengine.model.packed import Part
from hybridengine.run.errors import ModelError
from hybridengine.vision.bidirectional import find_spans


@dataclass(frozen=True)
class ImageInputs:
    """One image of a sequence, as the model's processor prepared it.

    key: hash of the image and of how it was prepared. Equal prefixes with other images differ.
    num_tokens: of its placeholders in the sequence, one run of the model's image token.
    tensors: by the names of the model's forward arguments (`pixel_values`, `image_grid_thw`), with
      the image's rows alone.
    """

    key: str
    num_tokens: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class PackedImages(Part):
    """The images of a packed batch of T tokens, each once, in the order of their placeholders.

    tensors: arguments of the model's forward, the rows of all images end to end.
    placeholders: bool [T], the tokens whose embeddings are features of an image.
    rope_position_ids: int64 [3, T], temporal position, row and column (M-RoPE); None: the model
      uses the position of the token in its sequence.
    spans: images whose tokens attend to each other in both directions.
    """

    tensors: Mapping[str, Tensor]
    placeholders: Tensor
    rope_position_ids: Tensor | None = None
    spans: tuple[BidirectionalSpan, ...] = ()

    def to(self, device: torch.device | str) -> PackedImages:
        """Move what there is of each token; `tensors`, which are large, stay on the CPU."""
        positions = self.rope_position_ids
        return PackedImages(
            self.tensors,
            self.placeholders.to(device),
            None if positions is None else positions.to(device),
            tuple(span._replace(token_index=span.token_index.to(device)) for span in self.spans),
        )

    def local(self, tokens: slice, rows: Tensor) -> PackedImages:
        raise ModelError(
            "images with sequence parallelism are not supported, as a rank would need features of "
            "other ranks' images; set ulysses_sequence_parallel_size to 1"
        )

    def arguments(self, position_ids: Tensor) -> dict[str, Any]:
        """Return the arguments of the model's forward on the device of the tokens."""
        device = self.placeholders.device
        arguments: dict[str, Any] = {
            name: x.to(device, non_blocking=True) for name, x in self.tensors.items()
        }
        if self.spans:
            arguments["bidirectional_spans"] = self.spans
        if self.rope_position_ids is not None:
            # transformers' form for packed sequences: positions in the sequence, then M-RoPE's.
            positions = torch.cat([position_ids, self.rope_position_ids])
            arguments["position_ids"] = positions[:, None]
        return arguments

    def context(self, model: nn.Module) -> AbstractContextManager[object]:
        return placeholders_of(model, self)


class _Family(NamedTuple):
    """How models of one `model_type` take images.

    tensors: names of the arguments of their forward.
    has_mrope: positions have three components, by `image_grid_thw`.
    is_bidirectional: tokens of an image attend to each other in both directions.
    is_framed: the processor replaces a placeholder by more than its own repetition.
    token_types: the argument of transformers' forward that marks tokens of images, if it has one.
    """

    tensors: tuple[str, ...]
    has_mrope: bool = False
    is_bidirectional: bool = False
    is_framed: bool = False
    token_types: str | None = None


_QWEN = _Family(("pixel_values", "image_grid_thw"), has_mrope=True, token_types="mm_token_type_ids")
_FAMILIES = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "llava_onevision": _Family(("pixel_values", "image_sizes")),
    "internvl": _Family(("pixel_values",), is_framed=True),
    "gemma3": _Family(
        ("pixel_values",), is_bidirectional=True, is_framed=True, token_types="token_type_ids"
    ),
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

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens of an image attend to each other in both directions."""
        return self._family.is_bidirectional

    @property
    def is_framed(self) -> bool:
        """Whether the processor replaces a placeholder by more than its own repetition."""
        return self._family.is_framed

    def token_types(self, is_image: Tensor) -> dict[str, Tensor]:
        """Return what transformers' own forward needs of `is_image` (bool), as an argument."""
        name = self._family.token_types
        return {} if name is None else {name: is_image.long()}

    @property
    def _family(self) -> _Family:
        return _FAMILIES[self.config.model_type]

    def find(self, ids: Tensor, images: Sequence[ImageInputs], sequence: int) -> list[int]:
        """Return where the placeholders of each of `images` begin in the token ids [l].

        A run of the placeholder token belongs to the next images whose tokens it holds exactly; any
        other run is text.

        Raises:
            ModelError: an image without placeholders, or without a tensor that the model needs; the
                message names `sequence`.
        """
        for image in images:
            if missing := [name for name in self._family.tensors if name not in image.tensors]:
                raise ModelError(
                    f"sequence {sequence}: an image has the tensors {sorted(image.tensors)}, but a "
                    f"model of type {self.config.model_type!r} needs {missing[0]!r}"
                )
        changes = nn.functional.pad((ids == self.token_id).int(), (1, 1)).diff()
        begins, ends = ((changes == sign).nonzero().flatten().tolist() for sign in (1, -1))
        runs = list(zip(begins, ends, strict=True))
        starts: list[int] = []
        for start, end in runs:
            edges = [start]
            for image in images[len(starts) :]:
                if edges[-1] >= end:
                    break
                edges.append(edges[-1] + image.num_tokens)
            if edges[-1] == end:
                starts += edges[:-1]
        if len(starts) < len(images):
            raise ModelError(
                f"sequence {sequence} has runs of {[end - start for start, end in runs]} tokens of "
                f"the image token {self.token_id}, but its images need "
                f"{[image.num_tokens for image in images]}; expand one placeholder per image to "
                "the number of its tokens, and keep the images of each sequence in their order"
            )
        return starts

    def mark(self, ids: Tensor, images: Sequence[ImageInputs], sequence: int) -> Tensor:
        """Return which of the token ids [l] are placeholders of `images`, bool [l].

        Raises ModelError as `find`.
        """
        is_image = torch.zeros_like(ids, dtype=torch.bool)
        for image, start in zip(images, self.find(ids, images, sequence), strict=True):
            is_image[start : start + image.num_tokens] = True
        return is_image

    def join(self, images: Sequence[ImageInputs]) -> dict[str, Tensor]:
        """Return the arguments of the model's forward for `images`."""
        return {
            # Processors that cut images into tiles return them as [1, tiles, 3, H, W].
            name: torch.cat(
                [x.flatten(0, 1) if x.ndim == 5 else x for x in (i.tensors[name] for i in images)]
            )
            for name in self._family.tensors
        }

    def rope_position_ids(
        self, length: int, images: Sequence[ImageInputs], starts: Sequence[int]
    ) -> Tensor | None:
        """Return the M-RoPE positions of a sequence, int64 [3, length]; None without M-RoPE.

        starts: of each image's placeholders. After an image of h x w placeholders, the text goes on
        max(h, w) positions after the image's first (Wang et al. 2024, arXiv 2409.12191, 2.1).
        """
        if not self._family.has_mrope:
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
        if self._family.has_mrope:
            merge = vision.spatial_merge_size
            channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
            width = channels * vision.temporal_patch_size * vision.patch_size**2
            tensors = {
                "pixel_values": torch.zeros(merge**2, width),
                "image_grid_thw": torch.tensor([[1, merge, merge]]),
            }
            return ImageInputs("", 1, tensors)
        size, patch = (
            x if isinstance(x, int) else x[0] for x in (vision.image_size, vision.patch_size)
        )
        side = size // patch
        num_tokens = round((side * getattr(self.config, "downsample_ratio", 1)) ** 2)
        num_tokens = getattr(self.config, "mm_tokens_per_image", num_tokens)  # Gemma 3
        tiles, tensors = 1, {}
        if "image_sizes" in self._family.tensors:  # the tiles of the image, after a thumbnail
            height, width = min(self.config.image_grid_pinpoints, key=lambda hw: hw[0] * hw[1])
            rows, columns = height // size, width // size
            tiles += rows * columns
            num_tokens += rows * side * (columns * side + 1)  # a newline after each row
            tensors["image_sizes"] = torch.tensor([[height, width]])
        tensors["pixel_values"] = torch.zeros(tiles, 3, size, size)
        return ImageInputs("", num_tokens, tensors)


@dataclass(frozen=True)
class SequenceImages:
    """The images of sequences, each with its own in their order, for `pack_rollouts`.

    images: of each sequence; None: there are none, and a dummy image alone is packed, so that all
      ranks run the vision tower.
    """

    images: Sequence[Sequence[ImageInputs]] | None
    image_format: ImageFormat

    def select(self, sequences: Sequence[int], rows: Tensor) -> SequenceImages:
        chosen = None if self.images is None else [self.images[i] for i in sequences]
        return SequenceImages(chosen, self.image_format)

    def place(self, input_ids: Tensor, cu_seqlens: Tensor) -> PlacedImages:
        """Find the images of each sequence; raises ModelError as `ImageFormat.find`."""
        ends = cu_seqlens.tolist()
        images = [()] * (len(ends) - 1) if self.images is None else self.images
        if len(images) != len(ends) - 1:
            raise ModelError(
                f"images: got those of {len(images)} sequences, expected {len(ends) - 1}; an empty "
                "list stands for a sequence without images"
            )
        placed, starts, positions = list[ImageInputs](), list[int](), list[Tensor | None]()
        for i, (start, end, own) in enumerate(zip(ends[:-1], ends[1:], images, strict=True)):
            found = self.image_format.find(input_ids[start:end], own, i)
            placed += own
            starts += [start + k for k in found]
            positions.append(self.image_format.rope_position_ids(end - start, own, found))
        return PlacedImages(placed, starts, len(input_ids), _cat(positions), self.image_format)


@dataclass(frozen=True)
class PlacedImages(Part):
    """Images at their places in sequences that are packed end to end.

    starts: token_index of the first placeholder of each image.
    num_tokens: of the batch.
    rope_position_ids: as in `PackedImages`.
    """

    images: list[ImageInputs]
    starts: list[int]
    num_tokens: int
    rope_position_ids: Tensor | None
    image_format: ImageFormat

    def distinct_ids(self, input_ids: Tensor) -> Tensor:
        """Return token ids [T] in which the placeholders of different images differ."""
        if not self.images:
            return input_ids
        ids, following = input_ids.clone(), int(input_ids.max()) + 1
        number = {key: k for k, key in enumerate(dict.fromkeys(i.key for i in self.images))}
        for image, start in zip(self.images, self.starts, strict=True):
            ids[start : start + image.num_tokens] = following + number[image.key]
        return ids

    def share(self, token_index: Tensor, num_tokens: int) -> PlacedImages:
        """Keep each image once where common prefixes are packed once."""
        at = token_index[self.starts].tolist() if self.starts else []
        once = dict(sorted(zip(at, self.images, strict=True), key=lambda pair: pair[0]))
        positions = self.rope_position_ids
        if positions is not None:
            merged = positions.new_empty(3, num_tokens)
            merged[:, token_index] = positions
            positions = merged
        images, starts = list(once.values()), list(once)
        return PlacedImages(images, starts, num_tokens, positions, self.image_format)

    def filler(self) -> tuple[int, int] | None:
        """A batch without images gets the placeholders of a dummy image."""
        if self.images:
            return None
        return self.image_format.token_id, self.image_format.dummy().num_tokens

    def pad(self, padding: int) -> PlacedImages:
        dummy = [] if self.images else [self.image_format.dummy()]
        own = self.image_format.rope_position_ids(padding, dummy, [0] * len(dummy))
        return PlacedImages(
            [*self.images, *dummy],
            [*self.starts, *([self.num_tokens] * len(dummy))],
            self.num_tokens + padding,
            _cat([self.rope_position_ids, own]),
            self.image_format,
        )

    def finish(self, cu_seqlens: Tensor, subtree_ends: Tensor | None) -> PackedImages:
        placeholders, lengths = torch.zeros(self.num_tokens, dtype=torch.bool), list[int]()
        for image, start in zip(self.images, self.starts, strict=True):
            placeholders[start : start + image.num_tokens] = True
            lengths.append(image.num_tokens)
        spans: tuple[BidirectionalSpan, ...] = ()
        if self.image_format.is_bidirectional:
            spans = find_spans(self.starts, lengths, cu_seqlens, subtree_ends)
        tensors = self.image_format.join(self.images)
        return PackedImages(tensors, placeholders, self.rope_position_ids, spans)


@contextmanager
def placeholders_of(model: Any, images: PackedImages) -> Iterator[None]:
    """Let the forward pass of `model` put image features at the placeholders of `images` alone.

    Its own rule, every token of the placeholder's id, also takes those that the model sampled.
    """
    base = model.base_model
    original = base.get_placeholder_mask

    def get_placeholder_mask(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(input_ids.masked_fill(~images.placeholders, -1), *args, **kwargs)

    base.get_placeholder_mask = get_placeholder_mask
    try:
        yield
    finally:
        del base.get_placeholder_mask


def check_vision_tower(config: PretrainedConfig) -> None:
    """Raise ModelError if the model of `config` has no vision tower."""
    if config.model_type not in _FAMILIES:
        raise ModelError(
            f"freeze_vision_tower: a model of type {config.model_type!r} has no vision tower; "
            "leave it out"
        )


def freeze_vision_tower(model: Any) -> None:
    """Exclude the vision tower from training, before `model` is sharded.

    A projector outside of the tower (LLaVA-OneVision, InternVL, Gemma 3) stays trained. Raises
    ModelError for a model without a tower.
    """
    check_vision_tower(model.config)
    model.get_encoder(modality="image").requires_grad_(False)


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given, dim=1) if given else None
