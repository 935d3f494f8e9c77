"""Typed configuration of a run: YAML plus `key=value` overrides, under verl's key names.

Every key here changes what a run does. A key that does not exist is an error with a
suggestion; verl's paths (`actor_rollout_ref.actor.optim.lr`, …) are accepted through `ALIASES`,
the one table of them.

    config = load_config("examples/demo/config.yaml", ["actor.optim.lr=1e-6"])
"""

from hybridengine.config.aliases import ALIASES, SFT_ALIASES
from hybridengine.config.loading import (
    PPO,
    ConfigError,
    config_to_yaml,
    keys_of,
    load_config,
    load_sft_config,
)
from hybridengine.config.schema import GRPOConfig, JobConfig
from hybridengine.config.sft import SFTConfig

__all__ = [
    "ALIASES",
    "PPO",
    "SFT_ALIASES",
    "ConfigError",
    "GRPOConfig",
    "JobConfig",
    "SFTConfig",
    "config_to_yaml",
    "keys_of",
    "load_config",
    "load_sft_config",
]
