"""Whether a run computes common prefixes once, and how its micro-batches are weighed."""

from __future__ import annotations

import torch

from hybridengine.kernels import choose_backend
from hybridengine.model.packing_check import shared_prefix_obstacle
from hybridengine.model.validation import check_model
from hybridengine.moe.batch_routes import config_route_shape
from hybridengine.run.config import ConfigError, RLConfig, SFTConfig
from hybridengine.run.session import Session
from hybridengine.train.algorithms import uses_critic
from hybridengine.train.batch import DataParallel
from hybridengine.train.build import checkpoint_layout, load_preparer
from hybridengine.train.performance import pair_cost
from hybridengine.vision.checks import find_conflicts


def build_data_parallel(config: RLConfig | SFTConfig, session: Session) -> DataParallel:
    """Build the replicas, which share prefixes where `actor.shared_prefix` and the models permit.

    SFT shares them wherever its model permits.
    """
    model = check_model(config.model.path, config.model.trust_remote_code)
    return DataParallel(
        session,
        config.sequence_parallel_size,
        shared_prefix=no_sharing_reason(config) is None,
        pair_cost=pair_cost(model, checkpoint_layout(config).parameters),
        route_shape=config_route_shape(config) if isinstance(config, RLConfig) else None,
        preparer=None if find_conflicts(config) else load_preparer(config),
    )


def no_sharing_reason(config: RLConfig | SFTConfig) -> str | None:
    """Return why no prefix is shared, None if prefixes are.

    Raises:
        ConfigError: `actor.shared_prefix=on` for models that cannot.
    """
    chosen = config.actor.shared_prefix if isinstance(config, RLConfig) else "auto"
    if chosen == "off":
        return "actor.shared_prefix is off"
    obstacle = _obstacle(config)
    if chosen == "on" and obstacle is not None:
        raise ConfigError(
            f"actor.shared_prefix is on, but {obstacle}; set it to auto, which packs every "
            "sequence with its own prompt there"
        )
    return obstacle


def _obstacle(config: RLConfig | SFTConfig) -> str | None:
    paths = [config.model.path]
    if isinstance(config, RLConfig) and uses_critic(config) and config.critic.model.path:
        paths.append(config.critic.model.path)
    if isinstance(config, RLConfig) and config.algorithm.distill.teacher_path:
        paths.append(config.algorithm.distill.teacher_path)
    for path in paths:
        model = check_model(path, config.model.trust_remote_code)
        if reason := shared_prefix_obstacle(model, config.model.trust_remote_code):
            return f"model {path!r} cannot share prefixes: {reason}"
    gpu = torch.device("cuda")
    if torch.cuda.is_available() and choose_backend("tree_attention", gpu) == "reference":
        return "tree_attention has no kernel for this GPU (see `hybridengine env`)"
    return None
