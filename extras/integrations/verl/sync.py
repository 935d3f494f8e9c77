"""Sync weights exactly between verl's FSDP2 engine and its vLLM servers (verl 0.9).

Importing this module in every process of a verl job replaces verl's sync:

    VERL_USE_EXTERNAL_MODULES=hybridengine.integrations.verl.sync

Trainers and servers on the same GPUs (verl's default, backend "naive"): every trainer rank sends
slices of its own shards to the vLLM workers that lack them; nothing is gathered. Trainers and
servers apart: the same, with

    actor_rollout_ref.rollout.checkpoint_engine.backend=hybridengine

What is replaced are three entries of verl's registries: the rollout ("vllm", "async"), the replica
"vllm" and the checkpoint engine "hybridengine". What is refused, and why: docs/verl.md.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from verl.workers.rollout import base, replica

from hybridengine.integrations.verl import checkpoint_engine  # noqa: F401
from hybridengine.integrations.verl.weights import PATCHES
from hybridengine.run.messages import SECRET, new_secret

__all__: list[str] = []

_ROLLOUT = "hybridengine.integrations.verl.rollout"


def _load_replica() -> type[Any]:
    from hybridengine.integrations.verl.rollout import Replica

    return Replica


def _enable() -> None:
    PATCHES.check("weights")
    base._ROLLOUT_REGISTRY["vllm", "async"] = f"{_ROLLOUT}.ServerAdapter"
    replica.RolloutReplicaRegistry.register("vllm", _load_replica)
    if not ray.is_initialized():  # the process that starts Ray; the others inherit the secret
        os.environ.setdefault(SECRET, new_secret())


_enable()
