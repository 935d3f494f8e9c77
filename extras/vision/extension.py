"""What models with a vision tower add to the core: `images` in `hybridengine.models`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers import PretrainedConfig

from hybridengine.model.attachments import Conflict
from hybridengine.model.extensions import ModelExtension
from hybridengine.run.config import JobConfig, RLConfig
from hybridengine.vision.formats import IMAGE_MODEL_TYPES, check_vision_tower, freeze_vision_tower
from hybridengine.vision.processor import load_image_preparer
from hybridengine.vision.rows import place_images

__all__ = ["VisionTowers", "extension"]


class VisionTowers(ModelExtension):
    """Types of models with a vision tower, which may be frozen."""

    image_model_types = IMAGE_MODEL_TYPES
    load_preparer = staticmethod(load_image_preparer)
    place_attachments = staticmethod(place_images)

    def check(self, config: JobConfig, model: PretrainedConfig, engine: str, exact: bool) -> None:
        from hybridengine.vision.checks import check_vllm  # it asks the trainer

        given = {
            "freeze_vision_tower": config.policy.freeze_vision_tower,
            "keep_vision_tower": config.model.keep_vision_tower,
        }
        for key in (key for key, is_set in given.items() if is_set):
            check_vision_tower(model, key)
        if isinstance(config, RLConfig) and not config.rollout.servers and engine == "vllm":
            check_vllm(model)

    def conflicts(self, config: JobConfig) -> Sequence[Conflict]:
        from hybridengine.vision.checks import find_conflicts  # it asks the trainer

        return find_conflicts(config)

    def changes(self, config: JobConfig) -> Iterable[Callable[[Any], object]]:
        return (freeze_vision_tower,) if config.policy.freeze_vision_tower else ()


extension = VisionTowers()
