"""Typed configuration of a run: YAML plus `key=value` overrides.

    config = load_config("examples/demo/config.yaml", ["actor.optim.lr=1e-6"])

Every key changes what a run does. An unknown key is an error, with a suggestion where one is close;
keys of other trainers are accepted, renamed or refused by the tables of installed extras. All
faults are one error. Nothing here imports torch.

    common, rl    every key: type, range, default, meaning
    loading       kinds of jobs; YAML and overrides → a checked configuration, and back; all keys
    settings      what YAML and overrides set, by key; keys of other trainers, misspelt ones
    validation    keys checked against each other
"""

from hybridengine.run.config.common import (
    Dtype,
    JobConfig,
    OptimConfig,
    RateConfig,
    SFTConfig,
    SFTDataConfig,
    ShardingConfig,
    keys_of,
)
from hybridengine.run.config.loading import (
    JOBS,
    config_to_yaml,
    load_config,
    load_job,
    load_sft_config,
    overrides_of,
    parse_overrides,
)
from hybridengine.run.config.rl import DataConfig, RewardConfig, RLConfig
from hybridengine.run.errors import ConfigError, ConfigNote

__all__ = [
    "JOBS",
    "ConfigError",
    "ConfigNote",
    "DataConfig",
    "Dtype",
    "JobConfig",
    "OptimConfig",
    "RLConfig",
    "RateConfig",
    "RewardConfig",
    "SFTConfig",
    "SFTDataConfig",
    "ShardingConfig",
    "config_to_yaml",
    "keys_of",
    "load_config",
    "load_job",
    "load_sft_config",
    "overrides_of",
    "parse_overrides",
]
