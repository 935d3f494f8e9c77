"""Typed configuration of a run: YAML plus `key=value` overrides, under verl's key names.

    config = load_config("examples/demo/config.yaml", ["actor.optim.lr=1e-6"])

Every key changes what a run does. An unknown key is an error, with a suggestion where one is close;
verl's other keys are accepted, renamed or refused by the tables of `config.aliases`. All faults are
one error. Nothing here imports torch.

    common, rl, sft, simulation    every key: type, range, default, meaning
    aliases            verl's keys
    loading            YAML and overrides → a checked configuration
    command            a configuration → the shortest command line
    suggest            the keys that a misspelt key may mean
    validation         keys checked against each other
    reference          the list that `hybridengine keys` prints
"""

from hybridengine.run.config.command import overrides_of
from hybridengine.run.config.common import Dtype, JobConfig, OptimConfig, RateConfig, ShardingConfig
from hybridengine.run.config.loading import (
    JOB_LOADERS,
    PPO,
    config_to_yaml,
    keys_of,
    load_config,
    load_sft_config,
    load_simulation_config,
    parse_overrides,
)
from hybridengine.run.config.rl import DataConfig, RLConfig
from hybridengine.run.config.rollout import RewardConfig
from hybridengine.run.config.sft import SFTConfig, SFTDataConfig
from hybridengine.run.config.simulation import SimulationConfig
from hybridengine.run.errors import ConfigError, ConfigNote

__all__ = [
    "JOB_LOADERS",
    "PPO",
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
    "SimulationConfig",
    "config_to_yaml",
    "keys_of",
    "load_config",
    "load_sft_config",
    "load_simulation_config",
    "overrides_of",
    "parse_overrides",
]
