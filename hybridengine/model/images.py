"""Images as inputs of a packed forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


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
    tensors: Mapping[str, torch.Tensor]
