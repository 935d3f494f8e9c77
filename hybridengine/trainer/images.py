"""What a job whose data has images cannot have."""

from __future__ import annotations

from collections.abc import Sequence

from hybridengine.config import ConfigError, RLConfig, SFTConfig
from hybridengine.data import PromptDataset, SFTDataset
from hybridengine.trainer.algorithms import uses_critic

__all__ = ["check_images"]


def check_images(
    config: RLConfig | SFTConfig, parts: Sequence[PromptDataset | SFTDataset | None]
) -> None:
    """Check that a job whose data has images has no part that reads text alone.

    parts: training and validation data. Raises ConfigError with the first image.
    """
    samples = (sample for part in parts for sample in part or ())
    image = next((sample.images[0] for sample in samples if sample.images), None)
    if image is None:
        return
    group = "" if isinstance(config, SFTConfig) else "actor."
    obstacles = {
        f"{group}ulysses_sequence_parallel_size={config.sequence_parallel_size}": (
            config.sequence_parallel_size > 1
        )
    }
    if isinstance(config, RLConfig):
        obstacles |= {
            "algorithm.adv_estimator=gae": uses_critic(config),
            "reward.reward_model.enable=true": config.reward.reward_model.enable,
            "algorithm.distill.teacher_path": config.distills,
            "rollout.servers": bool(config.rollout.servers),
        }
    for setting, is_set in obstacles.items():
        if is_set:
            raise ConfigError(
                f"{image.where}: the data has images, which {setting} does not support; leave it "
                "out, or the images"
            )
