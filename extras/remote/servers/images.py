"""Prompts with images for vLLM servers, which expand them: their tokens have to be the trainer's.

A server gets the prompt with one placeholder for each image, and the pixels as PNG. It returns the
prompt that it has read, and where the images are in it; both are compared with the trainer's.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch

from hybridengine.engine.interface import Prompt, check_prompt
from hybridengine.model.attachments import Attachment
from hybridengine.run.errors import RolloutError
from hybridengine.vision import ImagePreparer
from hybridengine.vision.decoding import decode_image

__all__ = ["ServerPrompt", "check_image_settings"]


@dataclass(frozen=True)
class ServerPrompt:
    """A prompt as `/inference/v1/generate` takes it.

    prompt: with all tokens of its images.
    keys: of the images, under which a server caches what it computes of them.
    ranges: (first token, number of tokens) of each image in the prompt.
    """

    prompt: Prompt
    keys: tuple[str, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(prompt: Prompt, preparer: ImagePreparer | None) -> ServerPrompt:
        """Raise RolloutError for a prompt with an image token that the model has sampled."""
        if not prompt.images:
            return ServerPrompt(prompt)
        assert preparer is not None, "RolloutEngine.takes_images"
        inputs = [preparer.inputs(image) for image in prompt.images]
        starts = preparer.image_format.find(torch.tensor(prompt.ids), inputs, 0)
        lengths = [image.num_tokens for image in inputs]
        if list(prompt.ids).count(preparer.token_id) != sum(lengths):
            raise RolloutError(
                f"{prompt.images[0].where}: the model has sampled the image token "
                f"{preparer.token_id} in an earlier turn, which a server takes for a place of an "
                "image; leave rollout.servers out, as vLLM in this process tells them apart"
            )
        return ServerPrompt(
            prompt,
            tuple(preparer.key(image) for image in prompt.images),
            tuple(zip(starts, lengths, strict=True)),
        )

    def request(self) -> dict[str, Any]:
        """Return the fields of a request that give the prompt."""
        ids = list(self.prompt.ids)
        if not self.ranges:
            return {"token_ids": ids}
        for start, length in reversed(self.ranges):
            del ids[start + 1 : start + length]
        parts = [
            {"type": "image_url", "url": _as_url(image), "uuid": key}
            for image, key in zip(self.prompt.images, self.keys, strict=True)
        ]
        return {"token_ids": ids, "content_parts": parts, "return_token_ids": True}

    def check(self, server: object, answer: Mapping[str, Any]) -> None:
        """Raise RolloutError where the server has expanded an image otherwise than the trainer."""
        if not self.ranges:
            return
        check_prompt(f"{server}", answer["prompt_token_ids"], self.prompt.ids)
        found = [(x["offset"], x["length"]) for x in answer["mm_placeholders"]["image"]]
        if found != list(self.ranges):
            raise RolloutError(
                f"{server} has read images at {found} (first token, number of tokens), and the "
                f"trainer's prompt has them at {list(self.ranges)}; give both the same model folder"
            )


def check_image_settings(
    server: object, config: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Raise RolloutError if a server prepares images otherwise than the trainer.

    config: vLLM's `ModelConfig`.
    options: `data.mm_processor_kwargs`.
    """
    settings = config.get("multimodal_config") or {}
    given = settings.get("mm_processor_kwargs") or {}
    if given != dict(options):
        raise RolloutError(
            f"{server} has --mm-processor-kwargs {given}, and data.mm_processor_kwargs is "
            f"{dict(options)}; make them equal"
        )
    if settings.get("mm_device_do_normalize"):
        raise RolloutError(
            f"{server} normalises images in the model, by numbers that --load-format dummy does "
            "not set; start it with --no-mm-device-do-normalize"
        )


def _as_url(image: Attachment) -> str:
    """Return the pixels that the trainer has decoded: other decoders may differ in a few."""
    content = BytesIO()
    decode_image(image).save(content, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
