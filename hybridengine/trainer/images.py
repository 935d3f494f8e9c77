"""What a job whose data has images cannot have."""

from __future__ import annotations

from collections.abc import Sequence

from hybridengine.config import ConfigError, RLConfig, SFTConfig
from hybridengine.data import PromptDataset, SFTDataset
from hybridengine.trainer.algorithms import uses_critic

__all__ = ["check_images", "parts_of_text"]


def parts_of_text(config: RLConfig | SFTConfig) -> list[str]:
    """Return the settings of a job that read text alone, such as those of a critic."""
    group = "" if isinstance(config, SFTConfig) else "actor."
    settings = {f"{group}ulysses_sequence_parallel_size": config.sequence_parallel_size > 1}
    if isinstance(config, RLConfig):
        settings |= {
            "algorithm.adv_estimator=gae": uses_critic(config),
            "reward.reward_model.enable=true": config.reward.reward_model.enable,
            "algorithm.distill.teacher_path": config.distills,
            "rollout.servers": bool(config.rollout.servers),
        }
    return [setting for setting, is_set in settings.items() if is_set]


def check_images(
    config: RLConfig | SFTConfig, parts: Sequence[PromptDataset | SFTDataset | None]
) -> None:
    """Check that a job whose data has images has no part that reads text alone.

    parts: training and validation data. Raises ConfigError with the first image.
    """
    if not (settings := parts_of_text(config)):
        return
    samples = (sample for part in parts for sample in part or ())
    image = next((sample.images[0] for sample in samples if sample.images), None)
    if image is not None:
        raise ConfigError(
            f"{image.where}: the data has images, which {settings[0]} does not support; leave it "
            "out, or the images"
        )
