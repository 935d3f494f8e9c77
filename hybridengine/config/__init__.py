"""Typed configuration of a run: YAML plus `key=value` overrides, under verl's key names.

Every key here changes what a run does. A key that does not exist is an error, with a suggestion
where one is close; verl's keys are accepted, mapped or explained by `config.aliases`, the one table
of them. All faults of a configuration are one error. Nothing here imports torch.

    config = load_config("examples/demo/config.yaml", ["actor.optim.lr=1e-6"])
"""

from hybridengine.config.errors import ConfigError, ConfigNote
from hybridengine.config.loading import (
    PPO,
    config_to_yaml,
    keys_of,
    load_config,
    load_sft_config,
)
from hybridengine.config.schema import GRPOConfig, JobConfig
from hybridengine.config.sft import SFTConfig

__all__ = [
    "PPO",
    "ConfigError",
    "ConfigNote",
    "GRPOConfig",
    "JobConfig",
    "SFTConfig",
    "config_to_yaml",
    "keys_of",
    "load_config",
    "load_sft_config",
]
