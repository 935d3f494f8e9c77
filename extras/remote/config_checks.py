"""Check the keys of ranks and servers with a role of their own, see `run.config.validation`."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from urllib.parse import urlsplit

from hybridengine.run.config.common import JobConfig
from hybridengine.run.config.rl import RLConfig
from hybridengine.run.config.validation import TP_SIZE, find_differences


def find_faults(config: JobConfig) -> Iterator[str]:
    """Yield a sentence for each setting of other ranks or servers that contradicts another."""
    if isinstance(config, RLConfig):
        yield from _overlap(config)
        yield from _critic_ranks(config)


def _overlap(config: RLConfig) -> Iterator[str]:
    """Yield what cannot be overlapped."""
    trainer, rollout = config.trainer, config.rollout
    mode = f"trainer.mode is {trainer.mode}"
    in_flight = f"rollout.in_flight_update is {rollout.in_flight_update}"
    if rollout.in_flight_update != "off" and trainer.mode != "async":
        yield (
            f"{in_flight} and {mode}, in which all responses finish before an update; set "
            "trainer.mode=async, or leave it off"
        )
    if not config.overlaps:
        return
    per_node, tp_size = rollout.n_gpus_per_node, rollout.tensor_model_parallel_size
    if rollout.servers:
        yield from _servers(config)
    elif per_node == 0:
        yield f"{mode} and rollout.n_gpus_per_node is 0; give the number of engine ranks"
    elif per_node * trainer.nnodes % tp_size or (per_node % tp_size and tp_size % per_node):
        yield (
            f"{TP_SIZE} is {tp_size}, which does not divide the {per_node} engine ranks of a "
            "machine (rollout.n_gpus_per_node), nor do they divide it"
        )
    if trainer.mode == "one_step_off" and trainer.staleness > 1:
        yield (
            f"trainer.staleness is {trainer.staleness}, and {mode}, in which rollouts are one "
            "update old; leave it 1, or set trainer.mode=async"
        )
    correction = config.algorithm.rollout_correction
    corrects = correction.applies_weights or (
        correction.bypass_mode and correction.loss_type == "ppo_clip"
    )
    if config.staleness and not config.distills and not corrects:
        yield (
            f"{mode} and algorithm.rollout_correction.rollout_is is null, so the loss would take "
            "rollouts of older weights for the policy's own; set it to token or sequence"
        )
    if rollout.in_flight_update != "off" and config.reshard.lora == "adapters":
        yield (
            f"{in_flight} and reshard.lora is adapters, but a running response of vLLM stays with "
            "the adapter that it began with; set reshard.lora=merged, or leave in_flight_update off"
        )


# What vLLM servers set themselves, by options of their own: the only values that are accepted.
_SET_BY_SERVERS: dict[str, object] = {
    "rollout.n_gpus_per_node": 0,
    "rollout.tensor_model_parallel_size": 1,
    "rollout.quantization": None,
    "rollout.engine_kwargs.vllm": {},
}


def _servers(config: RLConfig) -> Iterator[str]:
    """Yield what cannot be combined with vLLM servers."""
    servers, key = config.rollout.servers, "rollout.servers"
    for url in servers:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield f"{key} has {url!r}, which is no URL; expected one like http://10.0.0.5:8000"
    if len(set(servers)) < len(servers):
        yield f"{key} has a server twice; give every server once"
    if len(servers) < config.trainer.nnodes:
        yield (
            f"{key} has {len(servers)} servers for trainer.nnodes {config.trainer.nnodes}, and one "
            "rank of each machine sends requests to its share of them; give at least one for each"
        )
    reason = f"with {key} it is an option of `vllm serve`"
    yield from find_differences(config, _SET_BY_SERVERS, reason)
    if config.rollout.name == "hf":
        yield f"rollout.name is hf, and {key} are vLLM servers; leave it auto"
    if config.reshard.lora == "adapters":
        yield f"reshard.lora is adapters, but {key} take merged weights; set reshard.lora=merged"
    if config.algorithm.score_centering.enabled:
        yield (
            f"algorithm.score_centering.enabled is true, but {key} do not return the log-probs of "
            "the most likely entries; set it to false"
        )


def _critic_ranks(config: RLConfig) -> Iterator[str]:
    """Yield what does not fit the ranks of a critic apart from the policy."""
    ranks = config.num_critic_ranks
    if not ranks:
        return
    key = f"critic.n_gpus_per_node makes {ranks} ranks of the critic"
    fsdp_size, sp_size = config.sharding.fsdp_size, config.sequence_parallel_size
    for name, size in (
        ("actor.fsdp_config.fsdp_size", min(fsdp_size, ranks)),
        ("actor.ulysses_sequence_parallel_size", sp_size),
    ):
        if size > 0 and ranks % size:
            yield f"{key}, which {name} {attrgetter(name)(config)} does not divide; change one"
    responses = config.ppo_mini_batch_size * config.rollout.n
    if responses < ranks // sp_size:
        yield (
            f"{key}, which need a response each, but one optimizer step has {responses} "
            "(actor.ppo_mini_batch_size * rollout.n); raise one of the two"
        )
