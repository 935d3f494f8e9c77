"""Every key of a GRPO run, its type, its default and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["GRPOConfig"]


def _setting(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A config field with the limits that `_check_limits` enforces."""
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "choices": choices}
    return field(default=default, metadata=limits)


_KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


@dataclass(frozen=True)
class TrainedModelConfig:
    path: str = ""  # a Hugging Face folder, or a name in the local cache or the hub
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = False
    use_fused_kernels: bool = True  # log-probs straight from hidden states; false: whole logits
    lora_rank: int = _setting(0, at_least=0)  # 0: all weights are trained
    lora_alpha: float = _setting(16, above=0)  # adapters are scaled by lora_alpha / lora_rank
    target_modules: str | tuple[str, ...] = "all-linear"  # or names of linear layers


@dataclass(frozen=True)
class ModelConfig(TrainedModelConfig):
    external_lib: str | None = None  # Python file or module that registers estimators, rewards


@dataclass(frozen=True)
class DataConfig:
    train_files: str | tuple[str, ...] = ""
    val_files: str | tuple[str, ...] | None = None  # null: no validation at all
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    train_batch_size: int = _setting(64, at_least=1)  # prompts per step
    val_batch_size: int | None = _setting(None, at_least=1)  # prompts per call; null: all at once
    max_prompt_length: int = _setting(512, at_least=1)  # tokens
    max_response_length: int = _setting(512, at_least=1)  # tokens
    truncation: str = _setting("error", choices=("error", "left", "right"))
    filter_overlong_prompts: bool = False  # drop, and count, prompts above max_prompt_length
    shuffle: bool = True
    chat_template: str | None = None  # Jinja text or a file; null: the tokenizer's own


@dataclass(frozen=True)
class OptimConfig:
    lr: float = _setting(1e-6, above=0)
    lr_warmup_steps: int = _setting(0, at_least=0)
    weight_decay: float = _setting(0.01, at_least=0)
    betas: tuple[float, float] = _setting((0.9, 0.999), at_least=0, at_most=1)
    lr_scheduler_type: str = _setting("constant", choices=("constant", "linear", "cosine"))


@dataclass(frozen=True)
class WrapPolicyConfig:
    min_num_params: int = _setting(0, at_least=0)  # of an FSDP group; 0: one per decoder layer


@dataclass(frozen=True)
class ShardingConfig:
    fsdp_size: int = _setting(-1, at_least=-1)  # ranks that share one copy of the model; -1: all
    dtype: str = _setting("bfloat16", choices=("bfloat16", "float16", "float32"))  # of the compute
    optimizer_offload: bool = False  # Adam's moments are on the device during the step only
    reshard_after_forward: bool = True  # false: keep gathered weights until their backward
    forward_prefetch: bool = False  # gather the next layer's weights during this one's forward
    wrap_policy: WrapPolicyConfig = field(default_factory=WrapPolicyConfig)


@dataclass(frozen=True)
class FsdpConfig(ShardingConfig):
    param_offload: bool = False  # weights wait in host memory while the engine generates


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: str = _setting(
        "vanilla",
        choices=(
            "vanilla",
            "gspo",
            "geo_mean",
            "cispo",
            "sapo",
            "dppo_tv",
            "dppo_kl",
            "gpg",
            "clip_cov",
            "kl_cov",
        ),
    )
    clip_cov_ratio: float = _setting(2e-4, above=0, at_most=1)  # clip_cov: share of the tokens
    clip_cov_lb: float = 1.0  # clip_cov: from those whose covariance is between lb and ub
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = _setting(2e-4, above=0, at_most=1)  # kl_cov: share of the tokens
    ppo_kl_coef: float = _setting(0.1, at_least=0)  # kl_cov: weight of their KL


@dataclass(frozen=True)
class ActorConfig:
    ppo_mini_batch_size: int | None = _setting(None, at_least=1)  # prompts per optimizer step
    ppo_epochs: int = _setting(1, at_least=1)
    ppo_max_token_len_per_gpu: int = _setting(16384, at_least=1)  # tokens in one micro-batch
    clip_ratio: float = _setting(0.2, above=0)
    clip_ratio_low: float | None = _setting(None, above=0, at_most=1)  # null: clip_ratio
    clip_ratio_high: float | None = _setting(None, above=0)  # null: clip_ratio
    clip_ratio_c: float = _setting(3.0, above=1)  # dual clip, for negative advantages
    loss_agg_mode: str = _setting(
        "token-mean",
        choices=(
            "token-mean",
            "token-sum",
            "seq-mean-token-sum",
            "seq-mean-token-mean",
            "seq-mean-token-sum-norm",  # Dr.GRPO: divided by loss_scale_factor
        ),
    )
    loss_scale_factor: float | None = _setting(None, above=0)  # null: data.max_response_length
    tau_pos: float = _setting(1.0, above=0)  # sapo: temperature for positive advantages
    tau_neg: float = _setting(1.05, above=0)
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = _setting(0.001, at_least=0)
    kl_loss_type: str = _setting(
        "low_var_kl", choices=(*_KL_TYPES, *(f"{kind}+" for kind in _KL_TYPES))
    )
    grad_clip: float = _setting(1.0, above=0)
    ulysses_sequence_parallel_size: int = _setting(1, at_least=1)  # ranks that share a micro-batch
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True)
class SamplingConfig:
    """How validation samples; `do_sample: false` is greedy decoding."""

    n: int = _setting(1, at_least=1)
    temperature: float = _setting(0.0, at_least=0)
    top_p: float = _setting(1.0, above=0, at_most=1)
    top_k: int = _setting(-1, at_least=-1)
    do_sample: bool = False


@dataclass(frozen=True)
class RolloutConfig:
    name: str = _setting("auto", choices=("auto", "vllm", "hf"))  # auto: vllm where installed
    n: int = _setting(8, at_least=1)  # responses per prompt: the group
    temperature: float = _setting(1.0, above=0)
    top_p: float = _setting(1.0, above=0, at_most=1)
    top_k: int = _setting(-1, at_least=-1)  # -1: off
    tensor_model_parallel_size: int = _setting(1, at_least=1)
    gpu_memory_utilization: float = _setting(0.5, above=0, at_most=1)
    kv_cache_gib: float = _setting(1.0, above=0)  # per rank, on a CPU only
    max_num_seqs: int = _setting(256, at_least=1)
    max_num_batched_tokens: int = _setting(8192, at_least=1)
    max_model_len: int | None = _setting(None, at_least=2)  # null: prompt + response limit
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    free_cache_engine: bool = True  # on a GPU the engine's memory is the trainer's while it trains
    dtype: str = _setting("bfloat16", choices=("bfloat16", "float16", "float32"))
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass(frozen=True)
class CriticModelConfig:
    path: str | None = None  # causal LM or sequence classifier; null: model.path


@dataclass(frozen=True)
class CriticConfig:
    """The value model of `adv_estimator: gae`; mini-batches and epochs are the actor's."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    cliprange_value: float = _setting(0.5, above=0)
    grad_clip: float = _setting(1.0, above=0)


@dataclass(frozen=True)
class KLControlConfig:
    type: str = _setting("fixed", choices=("fixed", "adaptive"))
    kl_coef: float = _setting(0.001, at_least=0)
    horizon: float = _setting(10_000.0, above=0)  # adaptive: responses until the coefficient acts
    target_kl: float = _setting(0.1, above=0)  # adaptive: nats per token


@dataclass(frozen=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups whose responses all score alike are sampled anew."""

    enable: bool = False
    metric: str = "score"  # or a further result of the reward, such as acc
    max_num_gen_batches: int = _setting(10, at_least=1)  # then filled with groups without signal


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance weights and rejection against the gap between engine and trainer."""

    rollout_is: str | None = _setting("token", choices=("token", "sequence"))
    rollout_is_threshold: float | str = 2.0  # truncation; "0.5_5": weights outside become 0
    rollout_rs: str | None = None  # criteria such as "seq_mean_k3", several separated by commas
    rollout_rs_threshold: float | str | None = None  # one per criterion; k1: "lower_upper"

    @property
    def is_bounds(self) -> tuple[float | None, float]:
        """(lower or None, upper) of the importance weights."""
        *lower, upper = _numbers(self.rollout_is_threshold)
        if upper < 1:  # YAML reads 0.5_5 without quotes as 0.55
            raise ValueError(f"rollout_is_threshold {upper} is below 1; quote a pair")
        return (lower[0] if lower else None), upper

    @property
    def rejection(self) -> dict[str, float | tuple[float, float]]:
        """Criterion -> its bound, or (lower, upper)."""
        criteria = [c.strip() for c in (self.rollout_rs or "").split(",") if c.strip()]
        given = self.rollout_rs_threshold
        bounds = [] if given is None else [_numbers(part) for part in str(given).split(",")]
        paired = zip(criteria, bounds, strict=True)
        return {c: b[0] if len(b) == 1 else (b[0], b[1]) for c, b in paired}


def _numbers(text: float | str) -> list[float]:
    """ "0.5_5" -> [0.5, 5.0]; ValueError for what is not one or two numbers."""
    numbers = [float(part) for part in str(text).split("_")]
    if len(numbers) > 2:
        raise ValueError(f"{text!r} is not one number or lower_upper")
    return numbers


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = "grpo"  # a name of hybridengine.algorithms, or one of your own
    norm_adv_by_std_in_grpo: bool = True
    gamma: float = _setting(1.0, at_least=0, at_most=1)
    lam: float = _setting(1.0, at_least=0, at_most=1)
    gdpo_reward_keys: tuple[str, ...] | None = None  # null: every numeric result of the reward
    gdpo_reward_weights: tuple[float, ...] | None = None  # null: all 1
    use_kl_in_reward: bool = False
    kl_penalty: str = _setting("kl", choices=_KL_TYPES)
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    mask_truncated_completions: bool = False  # responses cut at the limit are not trained on


@dataclass(frozen=True)
class CustomRewardConfig:
    path: str | tuple[str, ...] = ""  # Python files, or "math_verify", the built-in rule
    name: str | tuple[str, ...] = "compute_score"


@dataclass(frozen=True)
class RewardManagerConfig:
    name: str = "naive"  # naive, batch, dapo, a registered name, or package.module.Class


@dataclass(frozen=True)
class RewardModelConfig:
    enable: bool = False
    model_path: str = ""  # a sequence classifier with one label
    weight: float = 1.0  # of its score beside the functions'


@dataclass(frozen=True)
class OverlongBufferConfig:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13) over the last `len` tokens allowed."""

    enable: bool = False
    len: int = _setting(128, at_least=1)
    penalty_factor: float = _setting(1.0, at_least=0)


@dataclass(frozen=True)
class RewardConfig:
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    weights: tuple[float, ...] | None = None  # one per function; null: all 1
    timeout_s: float = _setting(60.0, above=0)  # for one call of a function
    reward_manager: RewardManagerConfig = field(default_factory=RewardManagerConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@dataclass(frozen=True)
class ReshardConfig:
    # Staging memory of one all-to-all of a weight sync; at most two are alive at a time.
    bucket_bytes: int = _setting(64 * 2**20, at_least=4096)
    # LoRA: the engine gets weights with the adapters merged in, or the adapters beside the base.
    lora: str = _setting("merged", choices=("merged", "adapters"))


@dataclass(frozen=True)
class RunConfig:
    """What every kind of training says about its run."""

    total_epochs: int = _setting(1, at_least=1)
    total_training_steps: int | None = _setting(None, at_least=1)  # null: from total_epochs
    test_freq: int = _setting(-1, at_least=-1)  # validate every so many steps; -1: only at the end
    val_before_train: bool = True
    save_freq: int = _setting(-1, at_least=-1)  # checkpoint every so many steps; -1: none
    save_hf_model: bool = False  # with every checkpoint also a Hugging Face folder
    max_actor_ckpt_to_keep: int | None = _setting(None, at_least=1)  # the newest, and the best
    resume_mode: str = _setting("auto", choices=("auto", "disable", "path", "resume_path"))
    resume_from_path: str | None = None  # a checkpoint folder, for resume_mode path
    default_local_dir: str = "runs/train"
    logger: tuple[str, ...] = _setting(
        ("console", "jsonl"), choices=("console", "jsonl", "tensorboard", "wandb")
    )
    project_name: str = "hybridengine"
    experiment_name: str = "train"
    n_gpus_per_node: int = _setting(1, at_least=1)  # ranks on this machine, CPU or GPU
    nnodes: int = _setting(1, at_least=1)
    timeout_s: float = _setting(600.0, above=0)  # a collective slower than this ends the run


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    default_local_dir: str = "runs/grpo"
    experiment_name: str = "grpo"
    critic_warmup: int = _setting(0, at_least=0)  # steps that train the critic alone
    rollout_data_dir: str | None = None  # null: <default_local_dir>/rollouts


@dataclass(frozen=True)
class GRPOConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    seed: int = _setting(1, at_least=0)

    @property
    def world_size(self) -> int:
        return self.trainer.n_gpus_per_node * self.trainer.nnodes

    @property
    def data_parallel_size(self) -> int:
        """How many different micro-batches run at once; the ranks of one share its sequences."""
        return self.world_size // self.actor.ulysses_sequence_parallel_size

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens, that the engine is built for."""
        longest = self.data.max_prompt_length + self.data.max_response_length
        return self.rollout.max_model_len or longest

    @property
    def ppo_mini_batch_size(self) -> int:
        """Prompts per optimizer step; the whole batch where the config leaves it null."""
        return self.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def reward_functions(self) -> list[tuple[str, str]]:
        """(file, function name) of every reward function; one name stands for all files."""
        chosen = self.reward.custom_reward_function
        paths = (chosen.path,) if isinstance(chosen.path, str) else chosen.path
        names = (chosen.name,) * len(paths) if isinstance(chosen.name, str) else chosen.name
        return [(path, name) for path, name in zip(paths, names, strict=True) if path]

    @property
    def loss_scale_factor(self) -> float:
        """What seq-mean-token-sum-norm divides by."""
        return self.actor.loss_scale_factor or float(self.data.max_response_length)

    @property
    def uses_reference(self) -> bool:
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def clip_ratios(self) -> tuple[float, float]:
        """(low, high), each falling back to `actor.clip_ratio`."""
        a = self.actor
        low = a.clip_ratio if a.clip_ratio_low is None else a.clip_ratio_low
        return low, a.clip_ratio if a.clip_ratio_high is None else a.clip_ratio_high
