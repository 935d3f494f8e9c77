"""Prompts with images in vLLM: their tokens are the trainer's, and vLLM's own have to be the same.

vLLM expands one placeholder per image itself, and prepares the image once more. Prompts come here
with all tokens of their images, as the trainer reads them: instead of expanding anything, vLLM
looks for the tokens that it would have written, and refuses a prompt that does not have them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers.utils import is_torchvision_available

from hybridengine.engine.vllm.environment import without_torchvision
from hybridengine.model.attachments import Attachment
from hybridengine.run.errors import RolloutError
from hybridengine.vision.decoding import decode_image
from hybridengine.vision.formats import ImageFormat

__all__ = ["PromptImages", "image_options", "import_image_models", "prepare_images"]

_WITH_TORCHVISION = {"InternVLForConditionalGeneration"}  # vLLM builds a video processor for it


def prepare_images(processor: Any, architectures: Sequence[str]) -> None:
    """Let vLLM load models that take images where torchvision, which it imports, is missing.

    processor: transformers' one of the trainer, which vLLM then has as well.
    architectures: of the model's config.
    """
    if not is_torchvision_available():
        kind = type(processor)
        package = importlib.import_module(kind.__module__.rpartition(".")[0])
        setattr(package, kind.__name__, kind)  # vLLM would get one that raises
    import_image_models(architectures)
    if not is_torchvision_available():
        module: Any = importlib.import_module("vllm.transformers_utils.processor")
        module.cached_get_processor = lambda *args, **options: processor


def import_image_models(architectures: Sequence[str]) -> None:
    """Import vLLM's models where torchvision is missing; architectures: of the model's config."""
    if is_torchvision_available():
        return
    if _WITH_TORCHVISION & {*architectures}:
        raise RolloutError(
            f"vLLM's model {architectures[0]} needs torchvision, which is not installed; install "
            "it, or set rollout.name=hf"
        )
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    for name in architectures:
        if name in registry.ModelRegistry.models:
            with without_torchvision():
                importlib.import_module(registry.ModelRegistry.models[name].module_name)
    # By default a process of its own inspects the model, and imports torchvision there.
    registry._run_in_subprocess = lambda inspect: inspect()


def image_options(options: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for prompts with up to `limit` images, None: vLLM's.

    options: of the image processor.
    """
    limits = {"video": 0, "audio": 0} | ({} if limit is None else {"image": limit})
    return {
        "limit_mm_per_prompt": limits,
        "mm_processor_kwargs": options or None,
        # It runs the vision tower on the largest image that there is: minutes on a CPU.
        "skip_mm_profiling": not torch.cuda.is_available(),
        "skip_tokenizer_init": False,  # its processor wants it
        # The processor normalises pixels, as for the trainer. In the model, vLLM would do it by
        # buffers that no checkpoint has, and that `load_format="dummy"` fills with random numbers.
        "mm_device_do_normalize": False,
    }


class PromptImages:
    """Gives vLLM's processor prompts with all tokens of their images, and checks these.

    image_format: of the model.
    key: returns the trainer's key of an image, under which vLLM caches what it computes of it.
    renderer: of vLLM's `LLMEngine`.
    """

    def __init__(
        self, image_format: ImageFormat, key: Callable[[Attachment], str], renderer: Any
    ) -> None:
        self._is_bidirectional, self._key = image_format.is_bidirectional, key
        self._names: dict[str, str] = {}  # of images, by their keys
        self._processor, self._token_id = renderer.get_mm_processor(), image_format.token_id
        self._processor._maybe_apply_prompt_updates = self._find_placeholders

    def prompt(self, ids: Sequence[int], images: Sequence[Attachment]) -> Any:
        """Return a prompt as vLLM takes it."""
        if not images:
            return {"prompt_token_ids": list(ids)}
        if self._is_bidirectional and not torch.cuda.is_available():
            raise RolloutError(
                f"{images[0].where}: vLLM's attention on CPUs is causal, also among the tokens of "
                "an image, which attend to each other in both directions in this model; set "
                "rollout.name=hf"
            )
        keys = [self._key(image) for image in images]
        self._names |= {key: image.where for key, image in zip(keys, images, strict=True)}
        return {
            "prompt_token_ids": list(ids),
            "multi_modal_data": {"image": [decode_image(image) for image in images]},
            "multi_modal_uuids": {"image": keys},
        }

    def _find_placeholders(self, mm_items: Any, mm_res: Any) -> tuple[list[int], Any]:
        """In the place of vLLM's `_maybe_apply_prompt_updates`, for expanded prompts.

        Raises RolloutError where vLLM would have expanded an image to other tokens.
        """
        ids, counts = list(mm_res.prompt_ids), mm_items.get_all_counts()
        self._processor._validate_mm_kwargs(mm_res.kwargs, counts)
        self._processor._validate_mm_updates(mm_res.prompt_updates, counts)
        found = self._processor._find_mm_placeholders(ids, mm_res.prompt_updates)
        updates, placed = mm_res.prompt_updates["image"], list(found.get("image", ()))
        keys = mm_res.hashes["image"]
        if (number := len(placed)) < len(updates):
            after = placed[-1].start_idx + placed[-1].length if placed else 0
            expected = list(updates[number][0].content.full)
            self._refuse(ids, after, keys[number], expected.count(self._token_id))
        covered = {i for p in placed for i in range(p.start_idx, p.start_idx + p.length)}
        rest = {i for i, token in enumerate(ids) if token == self._token_id} - covered
        for key, place in zip(keys, placed, strict=True):
            start, end = place.start_idx, place.start_idx + place.length
            if rest & {start - 1, end}:  # image tokens that vLLM would read as text
                self._refuse(ids, start, key, list(place.tokens).count(self._token_id))
        return ids, found

    def _refuse(self, ids: list[int], after: int, key: str, num_tokens: int) -> None:
        """Raise RolloutError about the image `key`, of `num_tokens` in vLLM."""
        rest = ids[after:]
        start = rest.index(self._token_id) if self._token_id in rest else len(rest)
        run = len(list(takewhile(lambda token: token == self._token_id, rest[start:])))
        raise RolloutError(
            f"{self._names.get(key, key)}: vLLM expands the image to {num_tokens} image tokens, "
            f"with other tokens around them in some models; the trainer's prompt has {run} from "
            f"position {after + start} on. Engine and trainer need the same model folder, and "
            "versions of transformers and vLLM whose processors agree"
        )
