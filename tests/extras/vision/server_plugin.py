"""Lets a vLLM server of the tests load a model that takes images where torchvision is missing."""

from __future__ import annotations

import os

from transformers import AutoConfig

from hybridengine.vision import load_image_preparer
from hybridengine.vision.engine import prepare_images

__all__ = ["prepare"]


def prepare() -> None:
    path = os.environ["SERVED_MODEL"]
    config = AutoConfig.from_pretrained(path)
    preparer = load_image_preparer(config, path, {})
    assert preparer is not None
    prepare_images(preparer.processor, config.architectures)
