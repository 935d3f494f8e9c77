"""Check keys against each other.

Configuration checks have two homes. This module needs nothing but the configuration: no torch, no
machine, no file. What depends on the machine, the model files or the data is `preflight`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from hybridengine.run.config.common import JobConfig, RateConfig
from hybridengine.run.config.engine_checks import TP_SIZE, find_differences, find_engine_faults
from hybridengine.run.config.rl import ActorConfig, KLControlConfig, RLConfig
from hybridengine.run.config.sft import SFTConfig

_RANKS = "ranks (trainer.n_gpus_per_node * trainer.nnodes)"
_MODES_OF_A_PATH = ("path", "resume_path")  # of trainer.resume_mode


def find_faults(config: JobConfig) -> Iterator[str]:
    """Yield a sentence for each setting that contradicts another.

    A sentence contains the full names of its keys: `load_config` drops those about a key whose
    value is already refused.
    """
    for check in (_resume, _compile, _expert_adapters, _expert_parallel, _routers):
        yield from check(config)
    if isinstance(config, SFTConfig):
        yield from _sft(config)
    elif isinstance(config, RLConfig):
        for group in ("actor", "critic"):
            yield from _warmup(f"{group}.optim", getattr(config, group).optim)
        for check_rl in (
            _ranks,
            find_engine_faults,
            _rewards,
            _bypass,
            _distillation,
            _critic_ranks,
        ):
            yield from check_rl(config)


_KL_TERMS = (  # switch, coefficient, its default, schedule
    (
        "actor.use_kl_loss",
        "actor.kl_loss_coef",
        ActorConfig().kl_loss_coef,
        "actor.kl_loss_ctrl",
    ),
    (
        "algorithm.use_kl_in_reward",
        "algorithm.kl_ctrl.kl_coef",
        KLControlConfig().kl_coef,
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


def _resume(config: JobConfig) -> Iterator[str]:
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode in _MODES_OF_A_PATH and path is None:
        yield f"trainer.resume_mode is {mode}, which needs a folder in trainer.resume_from_path"


def _compile(config: JobConfig) -> Iterator[str]:
    size, group = config.sharding.wrap_policy.min_num_params, config.policy_group
    if config.model.compile and size:
        yield (
            f"model.compile is true and {group}.fsdp_config.wrap_policy.min_num_params is {size}, "
            "but a compiled layer is one FSDP group; leave it 0, a group per layer"
        )


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
    yield from _divisors(config, key)
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


def _sft(config: SFTConfig) -> Iterator[str]:
    data = config.data
    yield from _divisors(config, "model.fsdp_config.fsdp_size", "ulysses_sequence_parallel_size")
    if data.micro_batch_size_per_gpu is None and data.max_token_len_per_gpu < data.max_length:
        yield (
            f"data.max_token_len_per_gpu is {data.max_token_len_per_gpu}, less than the longest "
            f"conversation, data.max_length {data.max_length}; raise it"
        )
    yield from _warmup("optim", config.optim)


def _divisors(config: JobConfig, *keys: str) -> Iterator[str]:
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
    yield from _divisors(config, *sizes, *(() if config.overlaps else (TP_SIZE,)))
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


# What the loss of a distillation run does not read: the only values that are accepted.
_WITHOUT_POLICY_LOSS = {
    "actor.policy_loss.loss_mode": "vanilla",
    "actor.loss_agg_mode": "token-mean",
    "actor.entropy_coeff": 0.0,
    "actor.use_kl_loss": False,
    "algorithm.use_kl_in_reward": False,
    "algorithm.rollout_correction.rollout_rs": None,
    "algorithm.rollout_correction.rollout_is_batch_normalize": False,
    "algorithm.rollout_correction.bypass_mode": False,
    "model.use_fused_kernels": True,
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
