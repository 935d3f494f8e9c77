"""What models with a vision tower add to the core: `images` in `hybridengine.models`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from hybridengine.model.attachments import Conflict
from hybridengine.model.extensions import ModelExtension
from hybridengine.run.config import JobConfig
from hybridengine.vision.packed import (
    IMAGE_MODEL_TYPES,
    check_vision_tower,
    freeze_vision_tower,
)
from hybridengine.vision.processor import ImagePreparer, load_image_preparer

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

    def conflicts(self, config: JobConfig) -> Sequence[Conflict]:
        from hybridengine.vision.checks import find_conflicts  # it asks the trainer

        return find_conflicts(config)

    def changes(self, config: JobConfig) -> Iterable[Callable[[Any], object]]:
        return (freeze_vision_tower,) if config.policy.freeze_vision_tower else ()


extension = VisionTowers()
