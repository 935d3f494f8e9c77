"""Check keys against each other.

Configuration checks have two homes. This module needs nothing but the configuration: no torch, no
machine, no file. What depends on the machine, the model files or the data is `preflight`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from operator import attrgetter

from hybridengine.run import plugins
from hybridengine.run.config.common import JobConfig, RateConfig, SFTConfig
from hybridengine.run.config.rl import ActorConfig, KLControlConfig, RLConfig, truncates

TP_SIZE = "rollout.tensor_model_parallel_size"
_RANKS = "ranks (trainer.n_gpus_per_node * trainer.nnodes)"
_MODES_OF_A_PATH = ("path", "resume_path")  # of trainer.resume_mode


def find_faults(config: JobConfig) -> Iterator[str]:
    """Yield a sentence for each setting that contradicts another.

    A sentence contains the full names of its keys: `load_job` drops those about a key whose value
    is already refused. Extras register checks of their own in the group `hybridengine.checks`.
    """
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode in _MODES_OF_A_PATH and path is None:
        yield f"trainer.resume_mode is {mode}, which needs a folder in trainer.resume_from_path"
    if isinstance(config, SFTConfig):
        yield from _sft(config)
    elif isinstance(config, RLConfig):
        for group in ("actor", "critic"):
            yield from _warmup(f"{group}.optim", getattr(config, group).optim)
        for check in (
            *(_ranks, _lengths, _sampling, _multi_turn),
            *(_rewards, _bypass, _centering, _distillation),
        ):
            yield from check(config)
    for entry in plugins("checks").values():
        yield from entry.load()(config)


_KL_TERMS = (  # switch, coefficient, its default, schedule
    ("actor.use_kl_loss", "actor.kl_loss_coef", ActorConfig.kl_loss_coef, "actor.kl_loss_ctrl"),
    (
        *("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", KLControlConfig.kl_coef),
        "algorithm.kl_ctrl",
    ),
)
_DUAL_CLIP_MODES = ("vanilla", "dppo_tv", "dppo_kl")


def find_notes(config: JobConfig) -> Iterator[str]:
    """Yield a sentence for each setting that runs, but hardly as it was meant."""
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if path is not None and mode not in _MODES_OF_A_PATH:
        yield (
            f"trainer.resume_from_path is {path}, which trainer.resume_mode={mode} does not read; "
            "set resume_mode=path to resume from it"
        )
    if not isinstance(config, RLConfig) or config.distills:
        return
    yield from _idle_kl(config)
    loss_mode, bound = config.actor.policy_loss.loss_mode, config.actor.clip_ratio_c
    if bound != ActorConfig().clip_ratio_c and loss_mode not in _DUAL_CLIP_MODES:
        yield (
            f"actor.clip_ratio_c is {bound:g}, which actor.policy_loss.loss_mode {loss_mode} does "
            f"not read ({', '.join(_DUAL_CLIP_MODES)} do); leave it out"
        )


def _idle_kl(config: RLConfig) -> Iterator[str]:
    """Yield a sentence for a KL with a coefficient and no switch, or the other way round."""
    for switch, key, default, schedule in _KL_TERMS:
        is_on, coef, ctrl = attrgetter(switch, key, schedule)(config)
        if not is_on and coef not in (0, default):
            yield f"{key} is {coef:g}, but {switch} is false, so no KL is computed; set it to true"
        elif is_on and coef == 0 and (ctrl.type != "linear" or ctrl.final_kl_coef == 0):
            yield (
                f"{switch} is true with {key} 0: a reference is loaded and computed in every step, "
                f"and only its KL is measured; set {switch}=false, or a coefficient"
            )


def _sft(config: SFTConfig) -> Iterator[str]:
    data = config.data
    yield from find_indivisible(
        config, "model.fsdp_config.fsdp_size", "ulysses_sequence_parallel_size"
    )
    if data.micro_batch_size_per_gpu is None and data.max_token_len_per_gpu < data.max_length:
        yield (
            f"data.max_token_len_per_gpu is {data.max_token_len_per_gpu}, less than the longest "
            f"conversation, data.max_length {data.max_length}; raise it"
        )
    yield from _warmup("optim", config.optim)


def find_indivisible(config: JobConfig, *keys: str) -> Iterator[str]:
    for key in keys:
        size = attrgetter(key)(config)
        if size == 0 or (size > 0 and config.world_size % size):
            yield f"{key} is {size}, which does not divide the {config.world_size} {_RANKS}"


def _warmup(group: str, optim: RateConfig) -> Iterator[str]:
    if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio:
        yield (
            f"{group}.lr_warmup_steps is {optim.lr_warmup_steps} and {group}.lr_warmup_steps_ratio "
            f"is {optim.lr_warmup_steps_ratio}; give one of them"
        )


def _ranks(config: RLConfig) -> Iterator[str]:
    batch, mini_batch = config.data.train_batch_size, config.ppo_mini_batch_size
    sizes = ("actor.fsdp_config.fsdp_size", "actor.ulysses_sequence_parallel_size")
    yield from find_indivisible(config, *sizes, *(() if config.overlaps else (TP_SIZE,)))
    if batch % mini_batch:
        yield (
            f"actor.ppo_mini_batch_size is {mini_batch}, which does not divide "
            f"data.train_batch_size {batch}; choose a divisor"
        )
    if mini_batch * config.rollout.n < config.data_parallel_size:
        yield (
            f"one optimizer step has {mini_batch * config.rollout.n} responses "
            f"(actor.ppo_mini_batch_size * rollout.n) but {config.data_parallel_size} ranks need "
            "one each; raise one of the two"
        )


def _bypass(config: RLConfig) -> Iterator[str]:
    """Yield what contradicts the engine's log-probs as old ones."""
    correction, mode = config.algorithm.rollout_correction, config.actor.policy_loss.loss_mode
    key = "algorithm.rollout_correction"
    if correction.loss_type == "reinforce" and not correction.bypass_mode:
        yield f"{key}.loss_type is reinforce, the loss of bypass_mode; set {key}.bypass_mode=true"
    if correction.bypass_mode and mode != "vanilla":
        yield (
            f"actor.policy_loss.loss_mode is {mode}, but with {key}.bypass_mode the loss is "
            f"{key}.loss_type; leave loss_mode vanilla"
        )
    if correction.rollout_is_batch_normalize and not correction.applies_weights:
        yield (
            f"{key}.rollout_is_batch_normalize is true, but the loss has no importance weights "
            "(rollout_is is null, or bypass_mode with ppo_clip); leave it false"
        )


# Without these no log-prob is read before the update, which has a head of its own.
_IN_ONE_PASS: dict[str, object] = {
    "actor.policy_loss.loss_mode": "vanilla",
    "algorithm.use_kl_in_reward": False,
    "algorithm.rollout_correction.rollout_rs": None,
    "algorithm.rollout_correction.rollout_is_batch_normalize": False,
    "algorithm.rollout_correction.bypass_mode": False,
    "model.use_fused_kernels": True,
}


def _centering(config: RLConfig) -> Iterator[str]:
    batch, mini_batch = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    reason = "algorithm.score_centering.enabled needs weights by token of the only optimizer step"
    if config.algorithm.score_centering.enabled:
        needed = _IN_ONE_PASS | {
            "actor.ppo_epochs": 1,
            "actor.ppo_mini_batch_size": mini_batch and batch,
            "actor.ulysses_sequence_parallel_size": 1,
            "algorithm.rollout_correction.rollout_is": "token",
        }
        yield from find_differences(config, needed, reason)


# What else the loss of a distillation run does not read: the only values that are accepted.
_WITHOUT_POLICY_LOSS = _IN_ONE_PASS | {
    "actor.loss_agg_mode": "token-mean",
    "actor.entropy_coeff": 0.0,
    "actor.use_kl_loss": False,
    "algorithm.score_centering.enabled": False,
}


def _distillation(config: RLConfig) -> Iterator[str]:
    if not config.distills:
        return
    key = "algorithm.distill.teacher_path"
    reason = (
        f"with {key} the loss is the mean divergence from the teacher, computed from hidden states"
    )
    yield from find_differences(config, _WITHOUT_POLICY_LOSS, reason)
    if config.algorithm.adv_estimator == "gae":
        yield f"algorithm.adv_estimator is gae, but with {key} no critic is trained; leave it out"
    if config.algorithm.sampling_replay == "on":
        yield (
            f"algorithm.sampling_replay is on, but with {key} the distributions are over the full "
            "vocabulary; leave it auto"
        )


def _rewards(config: RLConfig) -> Iterator[str]:
    reward, limit = config.reward, config.data.max_response_length
    files, names = reward.custom_reward_function.path, reward.custom_reward_function.name
    model, buffer = reward.reward_model, reward.overlong_buffer
    if files and len(names) not in (1, len(files)):
        yield (
            f"reward.custom_reward_function.name has {len(names)} names for the {len(files)} files "
            "of path; give one for each, or one for all"
        )
    if not files and names != ("compute_score",):
        yield (
            f"reward.custom_reward_function.name is {list(names)}, but there is no "
            "reward.custom_reward_function.path that defines it; give the Python file"
        )
    if model.enable != bool(model.model_path):
        yield (
            f"reward.reward_model.enable is {model.enable} and model_path is "
            f"{model.model_path!r}; give both or neither"
        )
    num_rewards = len(files) + model.enable or 1  # none given: the rule of each data_source
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if weights is not None and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for the {len(keys)} names "
            "of algorithm.gdpo_reward_keys; give one for each"
        )
    if config.algorithm.use_kl_in_reward and config.algorithm.adv_estimator == "gdpo":
        yield (
            "algorithm.use_kl_in_reward is true, but algorithm.adv_estimator gdpo normalises the "
            "rewards themselves; use actor.use_kl_loss"
        )
    if reward.weights is not None and len(reward.weights) != num_rewards:
        yield (
            f"reward.weights has {len(reward.weights)} numbers for {len(files)} reward functions "
            f"and {int(model.enable)} reward models; give one for each"
        )
    if buffer.enable and buffer.len > limit:
        yield (
            f"reward.overlong_buffer.len is {buffer.len}, more than data.max_response_length "
            f"{limit}; lower it"
        )


def find_differences(
    config: RLConfig, accepted: Mapping[str, object], reason: str
) -> Iterator[str]:
    """Yield a sentence for each key that has another value than the accepted one.

    reason: why no other is, the part after "but".
    """
    for name, needed in accepted.items():
        if (value := attrgetter(name)(config)) != needed:
            yield f"{name} is {value}, but {reason}; leave it {json.dumps(needed)}"


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
    if config.algorithm.sampling_replay == "on" and not truncates(config.rollout):
        yield (
            "algorithm.sampling_replay is on, but rollout.top_p, top_k and min_p keep the full "
            "vocabulary; truncate with one of them, or leave it auto"
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


# What rollout.exact needs: only operators that both sides have.
_NEEDED_BY_EXACT: dict[str, object] = {
    "rollout.quantization": None,
    "model.compile": False,
    "model.cuda_graphs": False,
    "model.use_fused_kernels": True,
    "actor.ulysses_sequence_parallel_size": 1,
}


def exactness_obstacle(config: RLConfig) -> str | None:
    """Return the first setting that cannot be combined with rollout.exact, as a clause."""
    return next(_inexact_settings(config), None)


def _inexact_settings(config: RLConfig) -> Iterator[str]:
    for name, needed in _NEEDED_BY_EXACT.items():
        if (value := attrgetter(name)(config)) != needed:
            yield f"{name} is {value}, and that has no exact form"
    if truncates(config.rollout) and not config.replays_sampling:
        yield "sampling is truncated, and that needs algorithm.sampling_replay"
    rank, targets = config.model.lora_rank, config.model.target_modules
    if rank and config.model.target_parameters:
        yield "model.target_parameters is given, and adapters of experts have no exact form"
    if rank and config.reshard.lora == "merged" and config.sharding.wrap_policy.min_num_params:
        yield "wrap_policy.min_num_params is given, and weights merge in the FSDP group of a layer"
    if rank and "lm_head" in ([targets] if isinstance(targets, str) else targets):
        yield "model.target_modules names lm_head, and the head has no exact form with adapters"
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
