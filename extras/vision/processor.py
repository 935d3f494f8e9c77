"""The tokens and tensors of an image, by transformers' own processor of the checkpoint."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.utils import is_torchvision_available

from hybridengine.engine.vllm.environment import without_torchvision
from hybridengine.model.attachments import (
    Attachment,
    AttachmentPreparer,
    AttachmentRows,
    Replacement,
    VllmPrompt,
)
from hybridengine.model.packed import PartSource
from hybridengine.run.errors import ConfigError, DataError, unreadable_part
from hybridengine.vision.decoding import decode_image
from hybridengine.vision.engine import PromptImages, image_options, prepare_images
from hybridengine.vision.formats import IMAGE_MODEL_TYPES, ImageFormat, ImageInputs
from hybridengine.vision.packed import PackedImages, SequenceImages, placeholders_of

__all__ = [
    "ImagePreparer",
    "load_image_preparer",
    "load_processor",
]

# Of processors, what the number of an image's tokens depends on.
_TOKEN_SETTINGS = (
    "image_seq_length",
    "num_image_tokens",
    "patch_size",
    "spatial_merge_size",
    "vision_aspect_ratio",
    "vision_feature_select_strategy",
)
CACHE_BYTES = 1 << 30  # of prepared images that a process keeps


class ImagePreparer(AttachmentPreparer):
    """Prepares images for a model, each once as long as it is in the cache.

    processor: transformers' processor of the model.
    model: the model's config.
    options: of the image processor (`data.mm_processor_kwargs`).

    Attributes:
        image_format: how the model takes images.
        token_id: of the model's placeholder.
    """

    def __init__(
        self, processor: Any, model: Any, options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.processor, self.options = processor, dict(options)
        self.image_format = ImageFormat(model)
        self.token_id = self.image_format.token_id
        # By key, the last used at the end: inputs, and the text that replaces the placeholder.
        self._prepared = OrderedDict[str, tuple[ImageInputs, str]]()
        self._num_bytes = 0

    @cached_property
    def settings(self) -> str:
        """Hash of all that the preparation of an image depends on, besides the image."""
        code = sorted(Path(__file__).parent.glob("*.py"))
        state = {
            "code": [hashlib.sha256(file.read_bytes()).hexdigest() for file in code],
            "classes": [type(x).__name__ for x in (self.processor, self.processor.image_processor)],
            "image_processor": json.loads(self.processor.image_processor.to_json_string()),
            "options": self.options,
            **{name: getattr(self.processor, name, None) for name in _TOKEN_SETTINGS},
        }
        return hashlib.sha256(json.dumps(state, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def chat_template(self) -> str | None:
        """The processor's own, which may know images where the tokenizer's does not."""
        template = self.processor.chat_template
        return template if isinstance(template, str) else None

    def key(self, image: Attachment) -> str:
        """Return the key of `image` prepared for this model."""
        return hashlib.sha256(f"{image.sha256}{self.settings}".encode()).hexdigest()[:32]

    def inputs(self, image: Attachment) -> ImageInputs:
        """Return the image as an input of the model; DataError for one that it cannot take."""
        return self._get(image)[0]

    def _get(self, image: Attachment) -> tuple[ImageInputs, str]:
        key = self.key(image)
        if key in self._prepared:
            self._prepared.move_to_end(key)
            return self._prepared[key]
        prepared = self._prepared[key] = self._prepare(key, image)
        self._num_bytes += _size(prepared[0])
        while self._num_bytes > CACHE_BYTES and len(self._prepared) > 1:
            _, (oldest, _) = self._prepared.popitem(last=False)
            self._num_bytes -= _size(oldest)
        return prepared

    def expand(
        self, where: str, text: str, images: Sequence[Attachment]
    ) -> tuple[str, list[Replacement]]:
        """Expand the placeholder of each image in a rendered text to the image's tokens.

        Raises DataError where there are more or fewer placeholders than images.
        """
        token = self.processor.image_token
        found = len(re.findall(re.escape(token), text))
        if found != len(images):
            raise DataError(
                f"{where}: the text has the image token {token!r} {found} times for {len(images)} "
                "images; the chat template has to write it once for each, so give a "
                "data.chat_template that knows images, and no such text in messages"
            )
        if not images:
            return text, []
        replacements = [self._get(image)[1] for image in images]
        [expanded], [placed] = self.processor.get_text_with_replacements([text], replacements)
        spans = [(*each["span"], len(each["replacement"])) for each in placed]
        return expanded, [Replacement(*span) for span in spans]

    def _prepare(self, key: str, image: Attachment) -> tuple[ImageInputs, str]:
        pixels = decode_image(image)
        try:
            merged = self.processor._merge_kwargs(
                self.processor.valid_processor_kwargs, return_tensors="pt", **self.options
            )
            features, [text] = self.processor._process_images([pixels], **merged["images_kwargs"])
        except Exception as error:  # of the processor: sizes that it refuses, unknown options
            reason = f"{type(error).__name__}: {error}"[:300]
            raise DataError(
                f"{image.where}: the processor of the model refuses the image {image.name} of "
                f"{pixels.width} x {pixels.height} pixels: {reason}"
            ) from error
        token = self.processor.tokenizer.convert_ids_to_tokens(self.token_id)
        runs = re.findall(f"(?:{re.escape(token)})+", text)
        if len({*map(len, runs)}) != 1 or (len(runs) > 1 and not self.image_format.family.has_rows):
            raise DataError(
                f"{image.where}: the processor of the model makes {len(runs)} parts of the image "
                f"{image.name}, and only images in one part are supported; turn its option off in "
                "data.mm_processor_kwargs"
            )
        tensors = {name: torch.as_tensor(value) for name, value in features.items()}
        num_tokens = sum(map(len, runs)) // len(token)
        return ImageInputs(key, num_tokens, tensors, len(runs)), text

    def parts(self, attachments: AttachmentRows) -> dict[str, PartSource]:
        """A batch without images has a dummy image, so that every rank runs the vision tower."""
        inputs = [[self.inputs(image) for image in own] for own in attachments]
        return {"images": SequenceImages(inputs, self.image_format)}

    @contextmanager
    def padded(
        self, model: nn.Module, ids: Tensor, mask: Tensor, attachments: AttachmentRows
    ) -> Iterator[dict[str, Tensor]]:
        is_image, inputs = torch.zeros_like(ids, dtype=torch.bool), list[ImageInputs]()
        for row, own in enumerate(attachments):
            prepared = [self.inputs(image) for image in own]
            padding = ids.shape[1] - int(mask[row].sum())
            tokens = ids[row, padding:].cpu()
            is_image[row, padding:] = self.image_format.mark(tokens, prepared, row)
            inputs += prepared
        tensors = {name: x.to(ids.device) for name, x in self.image_format.join(inputs).items()}
        types = self.image_format.token_types(is_image) if inputs else {}
        with placeholders_of(model, PackedImages(tensors, is_image)):
            yield tensors | types

    def vllm_arguments(self, architectures: Sequence[str], limit: int | None) -> dict[str, Any]:
        prepare_images(self.processor, architectures)
        return image_options(self.options, limit)

    def vllm_prompt(self, renderer: Any) -> VllmPrompt:
        return PromptImages(self.image_format, self.key, renderer).prompt


def load_image_preparer(
    model: Any, path: str, options: Mapping[str, Any], trust_remote_code: bool = False
) -> ImagePreparer | None:
    """Load the processor of the model folder `path`; None where the model takes no images.

    model: its config. options: of `ImagePreparer`.

    Raises ModelError where a model of a supported family has no image processor that works here,
    and ConfigError for an option that it does not take.
    """
    if model.model_type not in IMAGE_MODEL_TYPES:
        return None
    try:
        processor = load_processor(path, model.model_type, trust_remote_code)
    except Exception as error:  # missing, cut and unknown files raise anything
        files = "preprocessor_config.json"
        raise unreadable_part("image processor", path, files, error) from error
    known = processor.image_processor.valid_kwargs.__annotations__
    if unknown := sorted(options.keys() - known.keys()):
        raise ConfigError(
            f"data.mm_processor_kwargs has {unknown[0]!r}, which the image processor of model "
            f"{path!r} does not take, it takes {sorted(known)}"
        )
    return ImagePreparer(processor, model, options)


def load_processor(path: str, model_type: str, trust_remote_code: bool = False) -> Any:
    """Load transformers' processor; without torchvision one that takes no videos."""
    import transformers
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.processing_utils import ProcessorMixin

    if is_torchvision_available():
        return AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    name = PROCESSOR_MAPPING_NAMES[model_type]
    with without_torchvision():  # which some processors import for a function that is not called
        kind: Any = getattr(importlib.import_module(getattr(transformers, name).__module__), name)
    parts: dict[str, Any] = dict.fromkeys(kind.get_attributes()) | {
        "image_processor": AutoImageProcessor.from_pretrained(
            path, trust_remote_code=trust_remote_code
        ),
        "tokenizer": AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code),
    }
    state, _ = kind.get_processor_dict(path)
    own = {n: v for n, v in state.items() if not isinstance(v, dict) and n != "processor_class"}
    if "video_processor" in parts:
        parts["video_processor"] = _NoVideos(parts["image_processor"])
    with patch.object(ProcessorMixin, "check_argument_for_proper_class"):
        return kind(**parts, **own)


class _NoVideos:
    """In the place of a video processor, which needs torchvision; sizes are those of images."""

    class valid_kwargs:
        pass

    def __init__(self, image_processor: Any) -> None:
        self._image_processor = image_processor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._image_processor, name)


def _size(inputs: ImageInputs) -> int:
    return sum(tensor.nbytes for tensor in inputs.tensors.values())
