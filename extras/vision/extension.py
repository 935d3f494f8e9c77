"""What models with a vision tower add to the core: `images` in `hybridengine.models`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from hybridengine.model.attachments import Attachment, Conflict
from hybridengine.model.extensions import ModelExtension
from hybridengine.run.config import JobConfig
from hybridengine.vision.formats import IMAGE_MODEL_TYPES, check_vision_tower, freeze_vision_tower
from hybridengine.vision.processor import ImagePreparer, load_image_preparer
from hybridengine.vision.rows import place_images

__all__ = ["VisionTowers", "extension"]


class VisionTowers(ModelExtension):
    """Types of models with a vision tower, which may be frozen."""

    image_model_types = IMAGE_MODEL_TYPES

    def check(self, config: JobConfig, model: PretrainedConfig) -> None:
        if config.policy.freeze_vision_tower:
            check_vision_tower(model)

    def load_preparer(
        self,
        model: PretrainedConfig,
        path: str,
        options: Mapping[str, Any],
        trust_remote_code: bool,
    ) -> ImagePreparer | None:
        return load_image_preparer(model, path, options, trust_remote_code)

    def place_attachments(
        self,
        where: str,
        folder: Path,
        chat: Sequence[Mapping[str, Any]],
        row: Mapping[str, Any],
        columns: Sequence[str],
    ) -> tuple[list[dict[str, Any]], list[Attachment]]:
        return place_images(where, folder, chat, row, columns)

    def conflicts(self, config: JobConfig) -> Sequence[Conflict]:
        from hybridengine.vision.checks import find_conflicts  # it asks the trainer

        return find_conflicts(config)

    def changes(self, config: JobConfig) -> Iterable[Callable[[Any], object]]:
        return (freeze_vision_tower,) if config.policy.freeze_vision_tower else ()


extension = VisionTowers()
