"""What a job whose data has images cannot have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from hybridengine.engine.vllm.environment import prepare_environment
from hybridengine.model.attachments import Conflict
from hybridengine.run.config import JobConfig, RLConfig, SFTConfig
from hybridengine.run.errors import ModelError
from hybridengine.train import build
from hybridengine.train.algorithms import uses_critic
from hybridengine.train.choices import engine_name
from hybridengine.vision.formats import IMAGE_MODEL_TYPES
from hybridengine.vision.processor import ImagePreparer

__all__ = ["check_vllm", "find_conflicts"]


def check_vllm(model: PretrainedConfig) -> None:
    """Raise ModelError if vLLM has no class for the vision-language model of `model`."""
    if model.model_type not in IMAGE_MODEL_TYPES:
        return
    prepare_environment()
    from vllm.model_executor.models.registry import ModelRegistry

    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(model)]
    if (name := model_class.__name__) not in ModelRegistry.models:
        raise ModelError(
            f"rollout.name is vllm, which has no model {name}, the class of type "
            f"{model.model_type!r}; set rollout.name=hf"
        )


def find_conflicts(config: JobConfig) -> list[Conflict]:
    """Return the settings of a job that images are not supported with."""
    group = "" if isinstance(config, SFTConfig) else "actor."
    found = list[Conflict]()
    if config.sequence_parallel_size > 1:
        found.append(Conflict(f"{group}ulysses_sequence_parallel_size"))
    if isinstance(config, RLConfig):
        found += _conflicts_of_models(config)
        found += _conflicts_of_engine(config)
    return found


def load_preparer(config: JobConfig, path: str | None = None) -> ImagePreparer | None:
    """Return the preparer of `build.load_preparer`, which is this package's."""
    return cast("ImagePreparer | None", build.load_preparer(config, path))


def _conflicts_of_models(config: RLConfig) -> Iterator[Conflict]:
    """Yield the further models that do not read the policy's tokens and tensors of images."""
    critic = config.critic.model.path if uses_critic(config) else None
    reward = config.reward.reward_model
    others = {
        "critic.model.path": critic,
        "algorithm.distill.teacher_path": config.algorithm.distill.teacher_path,
        "reward.reward_model.model_path": reward.model_path if reward.enable else None,
    }
    for setting, path in others.items():
        if path and not _reads_alike(config, path):
            yield Conflict(
                f"{setting}={path}",
                "give a model of the policy's family with the same image token and the same files "
                "preprocessor_config.json and processor_config.json, or leave the images out",
            )


def _reads_alike(config: RLConfig, path: str) -> bool:
    """Return whether the model at `path` takes images as the policy does, token by token."""
    own = load_preparer(config)
    try:
        other = load_preparer(config, path)
    except ModelError:  # without an image processor, which text does not need
        return False
    if own is None or other is None:
        return own is other
    settings, vocabularies = (
        [(x.settings, x.token_id) for x in (own, other)],
        [x.processor.tokenizer.get_vocab() for x in (own, other)],
    )
    return settings[0] == settings[1] and vocabularies[0] == vocabularies[1]


def _conflicts_of_engine(config: RLConfig) -> Iterator[Conflict]:
    preparer = load_preparer(config)
    if preparer is None:
        return
    image_format, kind = preparer.image_format, preparer.image_format.config.model_type
    if config.rollout.servers:
        if image_format.family.is_framed:
            yield Conflict(
                f"rollout.servers with a model of type {kind!r}",
                "its processor writes further tokens around those of an image, so that a server "
                "cannot be given the image in its place; leave rollout.servers out",
            )
    elif image_format.is_bidirectional and _runs_vllm_on_a_cpu(config):
        yield Conflict(
            f"rollout.name=vllm on a CPU with a model of type {kind!r}",
            "vLLM's attention on CPUs is causal, also among the tokens of an image, which attend "
            "to each other in both directions in this model; set rollout.name=hf",
        )


def _runs_vllm_on_a_cpu(config: RLConfig) -> bool:
    return engine_name(config) == "vllm" and not torch.cuda.is_available()
