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
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from hybridengine.model.attention import BidirectionalSpan
from hybridengine.model.packed import Part
from hybridengine.run.errors import ModelError
from hybridengine.vision.formats import ImageFormat, ImageInputs


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


@dataclass(frozen=True)
class SequenceImages:
    """The images of sequences, each with its own in their order, for `pack_rollouts`.

    images: of each sequence; None: there are none, and a dummy image alone is packed, so that all
      ranks run the vision tower.
    """

    needs_tails: ClassVar[bool] = True  # the last tokens may be of an image
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
            ids[start + image.offsets] = following + number[image.key]
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
        return replace(
            self,
            images=list(once.values()),
            starts=list(once),
            num_tokens=num_tokens,
            rope_position_ids=positions,
        )

    def filler(self) -> tuple[int, int] | None:
        """A batch without images gets the placeholders of a dummy image."""
        if self.images:
            return None
        return self.image_format.token_id, self.image_format.dummy().num_tokens

    def pad(self, padding: int) -> PlacedImages:
        dummy = [] if self.images else [self.image_format.dummy()]
        own = self.image_format.rope_position_ids(padding, dummy, [0] * len(dummy))
        return replace(
            self,
            images=[*self.images, *dummy],
            starts=[*self.starts, *([self.num_tokens] * len(dummy))],
            num_tokens=self.num_tokens + padding,
            rope_position_ids=_cat([self.rope_position_ids, own]),
        )

    def finish(self, cu_seqlens: Tensor, subtree_ends: Tensor | None) -> PackedImages:
        placeholders, spans = torch.zeros(self.num_tokens, dtype=torch.bool), []
        for image, start in zip(self.images, self.starts, strict=True):
            own = start + image.offsets
            placeholders[own] = True
            if self.image_format.is_bidirectional:
                if subtree_ends is None:
                    before = torch.arange(int(cu_seqlens[cu_seqlens <= start][-1]), start)
                else:  # no image branches
                    before = (subtree_ends[:start] > start).nonzero().flatten()
                index, in_windows = torch.cat([before, own]), self.image_format.family.in_windows
                spans.append(BidirectionalSpan(index, image.num_tokens, in_windows))
        tensors = self.image_format.join(self.images)
        return PackedImages(tensors, placeholders, self.rope_position_ids, tuple(spans))


@contextmanager
def placeholders_of(model: Any, images: PackedImages) -> Iterator[None]:
    """Let the forward pass of `model` put image features at the placeholders of `images` alone.

    Its own rule, every token of the placeholder's id, also takes those that the model sampled.
    """
    original = model.base_model.get_placeholder_mask

    def get_placeholder_mask(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_image = images.placeholders
        if is_image.shape[-1] != input_ids.shape[-1]:  # a token after the prompt, as generated
            is_image = torch.zeros_like(input_ids, dtype=torch.bool)
        return original(input_ids.masked_fill(~is_image, -1), *args, **kwargs)

    with patch.object(model.base_model, "get_placeholder_mask", get_placeholder_mask):
        yield


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given, dim=1) if given else None
