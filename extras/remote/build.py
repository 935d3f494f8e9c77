"""Build the two sides of the weight sync to engine ranks from the configuration of a run."""

from __future__ import annotations

from functools import partial
from typing import cast

from transformers import PreTrainedModel

from hybridengine.engine.interface import RolloutEngine
from hybridengine.model import adapter_shards, frozen_parameters, parameter_shards
from hybridengine.remote.roles import RoleLink
from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.run.config import RLConfig
from hybridengine.sync.trainers import DeltaMode
from hybridengine.train.models import Actor

SYNC_SHARE = 0.8  # of trainer.timeout_s: a sync gives up before the trainers' collectives do


def build_sender(config: RLConfig, actor: Actor, delta: DeltaMode, link: RoleLink) -> WeightSender:
    """Build a trainer rank's side of the weight sync to engine ranks."""
    mib, model = config.reshard.bucket_mib, cast(PreTrainedModel, actor.model)
    return WeightSender(
        partial(parameter_shards, actor.model),
        link.store.substore("weights"),
        num_engines=config.num_engines,
        bucket_bytes=None if mib is None else mib << 20,
        adapters=partial(adapter_shards, actor.model),
        frozen=partial(frozen_parameters, actor.model),
        merge=config.reshard.lora == "merged",
        delta=delta,
        config=model.config.to_dict(),
        timeout_s=SYNC_SHARE * link.timeout_s,
    )


def build_receiver(engine: RolloutEngine, link: RoleLink) -> WeightReceiver:
    """Build an engine rank's side of the weight sync."""
    assert link.role.engine is not None
    store = link.store.substore("weights")
    timeout_s = SYNC_SHARE * link.timeout_s
    return WeightReceiver(engine, store, index=link.role.engine, timeout_s=timeout_s)
