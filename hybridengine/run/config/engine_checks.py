"""Check the keys of rollouts and their engines against each other, see `config.validation`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from operator import attrgetter
from urllib.parse import urlsplit

from hybridengine.run.config.rl import RLConfig

TP_SIZE = "rollout.tensor_model_parallel_size"


def find_differences(
    config: RLConfig, accepted: Mapping[str, object], reason: str
) -> Iterator[str]:
    """Yield a sentence for each key that has another value than the accepted one.

    reason: why no other is, the part after "but".
    """
    for name, needed in accepted.items():
        if (value := attrgetter(name)(config)) != needed:
            yield f"{name} is {value}, but {reason}; leave it {json.dumps(needed)}"


def find_engine_faults(config: RLConfig) -> Iterator[str]:
    """Yield a sentence for each setting of rollouts that contradicts another."""
    for check in (_lengths, _sampling, _router_replay, _exact, _multi_turn, _overlap):
        yield from check(config)


def _lengths(config: RLConfig) -> Iterator[str]:
    rollout, sp_size = config.rollout, config.sequence_parallel_size
    longest, max_tokens = config.max_sequence_length, config.actor.ppo_max_token_len_per_gpu
    if max_tokens * sp_size < longest:
        yield (
            f"actor.ppo_max_token_len_per_gpu is {max_tokens} on each of {sp_size} ranks that "
            "share a micro-batch (actor.ulysses_sequence_parallel_size), less than the longest "
            f"sequence of {longest} tokens (data.max_prompt_length + data.max_response_length)"
        )
    if config.max_model_len < longest:
        yield (
            f"rollout.max_model_len is {config.max_model_len}, less than data.max_prompt_length + "
            f"data.max_response_length = {longest}; raise it, or leave it null"
        )
    if not rollout.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
        yield (
            f"rollout.max_num_batched_tokens is {config.max_num_batched_tokens}, less than the "
            f"longest prompt ({config.max_model_len}, rollout.max_model_len), and "
            "rollout.enable_chunked_prefill is false; raise it, or allow chunks"
        )


def _sampling(config: RLConfig) -> Iterator[str]:
    sampling = config.rollout.val_kwargs
    if config.reshard.lora == "adapters" and not config.model.lora_rank:
        yield "reshard.lora is 'adapters', but no adapter is trained; set model.lora_rank"
    if config.rollout.quantization and config.reshard.delta == "on":
        yield (
            f"rollout.quantization is {config.rollout.quantization} and reshard.delta is on, but "
            "the scale of a block depends on all of it; set reshard.delta=auto, which sends all"
        )
    if sampling.do_sample and sampling.temperature == 0:
        yield "rollout.val_kwargs.temperature is 0 with do_sample=true; give a temperature above 0"
    if not sampling.do_sample and sampling.n > 1:
        yield (
            f"rollout.val_kwargs.n is {sampling.n}, but greedy responses are all equal; "
            "set rollout.val_kwargs.do_sample=true, or n=1"
        )
    if config.algorithm.sampling_replay == "on" and not config.rollout.truncates:
        yield (
            "algorithm.sampling_replay is on, but rollout.top_p is 1 and rollout.top_k is "
            f"{config.rollout.top_k}, which keep the full vocabulary; truncate with one of them, "
            "or leave it auto"
        )
    try:
        _ = config.algorithm.rollout_correction.is_bounds
        _ = config.algorithm.rollout_correction.rejection
    except ValueError as error:
        yield (
            f"algorithm.rollout_correction: {error}; rollout_is_threshold is a number or "
            '"lower_upper", rollout_rs_threshold one of these per criterion of rollout_rs, '
            "separated by commas"
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


# What rollout.exact needs: only operators that both sides have.
_NEEDED_BY_EXACT: dict[str, object] = {
    "rollout.quantization": None,
    "rollout.top_p": 1.0,
    "rollout.top_k": -1,
    "model.compile": False,
    "model.use_fused_kernels": True,
    "actor.ulysses_sequence_parallel_size": 1,
}


def exactness_obstacle(config: RLConfig) -> str | None:
    """Return the first setting that cannot be combined with rollout.exact, as a clause."""
    return next(_inexact_settings(config), None)


def _exact(config: RLConfig) -> Iterator[str]:
    if config.rollout.exact == "on":
        for obstacle in _inexact_settings(config):
            yield (
                f"rollout.exact is on, but {obstacle}; change that setting, or set "
                "rollout.exact=auto to train without exact log-probs"
            )


def _inexact_settings(config: RLConfig) -> Iterator[str]:
    for name, needed in _NEEDED_BY_EXACT.items():
        if (value := attrgetter(name)(config)) != needed:
            yield f"{name} is {value}, and that has no exact form"
    rank, targets = config.model.lora_rank, config.model.target_modules
    if rank and config.reshard.lora == "merged":
        yield (
            f"model.lora_rank is {rank} and reshard.lora merged, and merged weights are rounded "
            "elsewhere; set reshard.lora=adapters"
        )
    if rank and "lm_head" in ([targets] if isinstance(targets, str) else targets):
        yield "model.target_modules names lm_head, and the head has no exact form with adapters"
    if config.rollout.name == "hf":
        yield "rollout.name is hf, and exact operators replace those of vLLM"
    if config.overlaps and config.rollout.tensor_model_parallel_size > 1:
        yield (
            f"{TP_SIZE} is {config.rollout.tensor_model_parallel_size} and trainer.mode "
            f"{config.trainer.mode}, and the trainer has to know which sums engine ranks add"
        )
    engine, trainer = config.rollout.dtype, config.actor.fsdp_config.dtype
    if engine not in ("auto", trainer) or trainer == "float16":
        yield (
            f"rollout.dtype is {engine} and actor.fsdp_config.dtype is {trainer}: engine and "
            "trainer need one type, float32 or bfloat16 (rollout.dtype=auto takes the trainer's)"
        )


def _multi_turn(config: RLConfig) -> Iterator[str]:
    multi_turn = config.rollout.multi_turn
    if not multi_turn.enable:
        for key in ("tool_config_path", "function_tool_path"):
            if getattr(multi_turn, key):
                yield (
                    f"rollout.multi_turn.{key} is given, but rollout.multi_turn.enable is false; "
                    "set it to true, or remove the tools"
                )
        return
    if config.data.truncation != "error":
        yield (
            f"data.truncation is {config.data.truncation}, but turns are appended to the full "
            "prompt (rollout.multi_turn.enable); set data.filter_overlong_prompts=true"
        )
    if multi_turn.tool_timeout_s >= config.trainer.timeout_s:
        yield (
            f"rollout.multi_turn.tool_timeout_s is {multi_turn.tool_timeout_s}, not below "
            f"trainer.timeout_s {config.trainer.timeout_s}, for which other ranks wait; lower it"
        )


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
    if config.replays_sampling:
        yield (
            f"algorithm.sampling_replay is {config.algorithm.sampling_replay}, but {key} do not "
            "return what sampling kept; set it to off, or rollout.top_p=1 and top_k=-1"
        )
