"""Check the keys of mixtures of experts against each other, see `run.config.validation`."""

from __future__ import annotations

from collections.abc import Iterator

from hybridengine.run.config.common import JobConfig
from hybridengine.run.config.rl import RLConfig
from hybridengine.run.config.validation import find_indivisible


def find_faults(config: JobConfig) -> Iterator[str]:
    """Yield a sentence for each setting of experts or routers that contradicts another."""
    yield from _expert_adapters(config)
    yield from _expert_parallel(config)
    yield from _routers(config)
    if isinstance(config, RLConfig):
        yield from _router_replay(config)


def _expert_adapters(config: JobConfig) -> Iterator[str]:
    key, model = "model.target_parameters", config.model
    shared, size = model.share_expert_adapters, config.sharding.wrap_policy.min_num_params
    if shared != "none" and not model.target_parameters:
        yield (
            f"model.share_expert_adapters is {shared}, but {key} is empty, so no experts have "
            "adapters; name their weights there, such as experts.down_proj"
        )
    if not (model.lora_rank and model.target_parameters):
        return
    if size:
        yield (
            f"{config.policy_group}.fsdp_config.wrap_policy.min_num_params is {size}, but the "
            f"adapters of experts ({key}) are read in the FSDP group of their layer; leave it 0"
        )
    if isinstance(config, RLConfig) and config.reshard.lora == "adapters":
        yield (
            f"reshard.lora is adapters, but those of experts ({key}) are not sent apart from "
            "their weights; set reshard.lora=merged"
        )


def _expert_parallel(config: JobConfig) -> Iterator[str]:
    sharding, group = config.sharding, f"{config.policy_group}.fsdp_config"
    key = f"{group}.expert_parallel_size"
    if (size := sharding.expert_parallel_size) == 1:
        return
    yield from find_indivisible(config, key)
    others = {
        f"{group}.fsdp_size": (sharding.fsdp_size, -1),
        f"{group}.wrap_policy.min_num_params": (sharding.wrap_policy.min_num_params, 0),
        "model.compile": (config.model.compile, False),
        "model.target_parameters": (config.model.target_parameters, ()),
    }
    for other, (value, neutral) in others.items():
        if value != neutral:
            yield f"{key} is {size}, which {other} = {value} does not allow; leave it {neutral}"


def _routers(config: JobConfig) -> Iterator[str]:
    """Yield what LoRA, which leaves the weights of the model as they are, contradicts."""
    group, rank = config.policy_group, config.model.lora_rank
    for name in ("router_bias_update_rate", "freeze_moe_router"):
        if rank and (value := getattr(config.policy, name)):
            yield (
                f"{group}.{name} is {value}, but with model.lora_rank {rank} only adapters change, "
                "and routers have none; leave it out"
            )


def _router_replay(config: RLConfig) -> Iterator[str]:
    """Yield what cannot be combined with router replay."""
    chosen = config.actor.router_replay
    if chosen == "off":
        return
    key = f"actor.router_replay is {chosen}"
    if config.model.compile:
        yield f"{key}, but model.compile makes one graph of a layer and its router; set it to false"
    if chosen == "rollout" and config.rollout.name == "hf":
        yield f"{key}, but rollout.name=hf records no routes; set rollout.name=vllm"
    if chosen == "rollout" and config.rollout.servers:
        yield (
            f"{key}, but rollout.servers answer without routed experts; set it to off or old, or "
            "use engines of the job (rollout.n_gpus_per_node)"
        )
    if chosen == "old" and (config.algorithm.rollout_correction.bypass_mode or config.distills):
        yield (
            f"{key}, but without a pass for old log-probs (algorithm.rollout_correction.bypass_mode"
            ", algorithm.distill.teacher_path) no routes are recorded; set it to off or rollout"
        )
