"""Every key of an RL run, its type, its limits and its default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

__all__ = ["GRPOConfig", "JobConfig"]

Count = Annotated[int, Field(ge=1, strict=True)]
Natural = Annotated[int, Field(ge=0, strict=True)]
OrOff = Annotated[int, Field(ge=-1, strict=True)]  # -1: off, or all
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, strict=True)]
NotNegative = Annotated[float, Field(ge=0, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]
Discount = Annotated[float, Field(ge=0, le=1, strict=True)]
Flag = Annotated[bool, Field(strict=True)]


def _listed(given: Any) -> Any:
    """A text alone is a list of one."""
    return ((given,) if given else ()) if isinstance(given, str) else given


Texts = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Truncation = Literal["error", "left", "right"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
KLType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KLLossType = Literal[KLType, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]


@dataclass(frozen=True)
class TrainedModelConfig:
    path: str = ""  # a Hugging Face folder, or a name in the local cache or the hub
    trust_remote_code: Flag = False
    enable_gradient_checkpointing: Flag = False
    use_fused_kernels: Flag = True  # log-probs straight from hidden states; false: whole logits
    lora_rank: Natural = 0  # 0: all weights are trained
    lora_alpha: Positive = 16.0  # adapters are scaled by lora_alpha / lora_rank
    target_modules: str | tuple[str, ...] = "all-linear"  # or names of linear layers


@dataclass(frozen=True)
class ModelConfig(TrainedModelConfig):
    external_lib: str | None = None  # Python file or module that registers estimators, rewards


@dataclass(frozen=True)
class DataConfig:
    train_files: Texts = ()
    val_files: Texts | None = None  # null: no validation at all
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    train_batch_size: Count = 64  # prompts per step
    val_batch_size: Count | None = None  # prompts per call; null: all at once
    max_prompt_length: Count = 512  # tokens
    max_response_length: Count = 512  # tokens
    truncation: Truncation = "error"
    filter_overlong_prompts: Flag = False  # drop, and count, prompts above max_prompt_length
    shuffle: Flag = True
    chat_template: str | None = None  # Jinja text or a file; null: the tokenizer's own


@dataclass(frozen=True)
class RateConfig:
    lr: Positive = 1e-6
    lr_warmup_steps: Natural = 0


@dataclass(frozen=True)
class OptimConfig(RateConfig):
    weight_decay: NotNegative = 0.01
    betas: tuple[Discount, Discount] = (0.9, 0.999)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(frozen=True)
class WrapPolicyConfig:
    min_num_params: Natural = 0  # of an FSDP group; 0: one per decoder layer


@dataclass(frozen=True)
class ShardingConfig:
    fsdp_size: OrOff = -1  # ranks that share one copy of the model; -1: all
    dtype: Dtype = "auto"  # of the compute; auto: bfloat16 where it is fast, else float32
    optimizer_offload: Flag = False  # Adam's moments are on the device during the step only
    reshard_after_forward: Flag = True  # false: keep gathered weights until their backward
    forward_prefetch: Flag = False  # gather the next layer's weights during this one's forward
    wrap_policy: WrapPolicyConfig = WrapPolicyConfig()


@dataclass(frozen=True)
class FsdpConfig(ShardingConfig):
    param_offload: Flag = False  # weights wait in host memory while the engine generates


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: Literal[
        "vanilla", "gspo", "geo_mean", "cispo", "sapo", "dppo_tv", "dppo_kl", "gpg",
        "clip_cov", "kl_cov",
    ] = "vanilla"  # fmt: skip


@dataclass(frozen=True)
class ActorConfig:
    ppo_mini_batch_size: Count | None = None  # prompts per optimizer step; null: all
    ppo_epochs: Count = 1
    ppo_max_token_len_per_gpu: Count = 16384  # tokens in one micro-batch
    clip_ratio: Positive = 0.2
    clip_ratio_low: Share | None = None  # null: clip_ratio
    clip_ratio_high: Positive | None = None  # null: clip_ratio
    clip_ratio_c: Annotated[float, Field(gt=1, strict=True)] = 3.0  # for negative advantages
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
        "seq-mean-token-sum-norm",  # Dr.GRPO: divided by data.max_response_length
    ] = "token-mean"  # fmt: skip
    entropy_coeff: Number = 0.0
    use_kl_loss: Flag = False
    kl_loss_coef: NotNegative = 0.001
    kl_loss_type: KLLossType = "low_var_kl"
    grad_clip: Positive = 1.0  # the critic's too
    ulysses_sequence_parallel_size: Count = 1  # ranks that share a micro-batch
    fsdp_config: FsdpConfig = FsdpConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    optim: OptimConfig = OptimConfig()


@dataclass(frozen=True)
class SamplingConfig:
    """How validation samples; `do_sample: false` is greedy decoding."""

    n: Count = 1
    temperature: NotNegative = 0.0
    top_p: Share = 1.0
    top_k: OrOff = -1
    do_sample: Flag = False


@dataclass(frozen=True)
class RolloutConfig:
    name: Literal["auto", "vllm", "hf"] = "auto"  # auto: vllm where installed
    n: Count = 8  # responses per prompt: the group
    temperature: Positive = 1.0
    top_p: Share = 1.0
    top_k: OrOff = -1
    tensor_model_parallel_size: Count = 1
    gpu_memory_utilization: Share = 0.5
    kv_cache_gib: Positive = 1.0  # per rank, on a CPU only
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 8192
    max_model_len: Count | None = None  # null: prompt + response limit
    enforce_eager: Flag = False
    enable_prefix_caching: Flag = True
    enable_chunked_prefill: Flag = True
    free_cache_engine: Flag = True  # on a GPU the engine's memory is the trainer's while it trains
    dtype: Dtype = "auto"  # as fsdp_config.dtype
    val_kwargs: SamplingConfig = SamplingConfig()


@dataclass(frozen=True)
class CriticModelConfig:
    path: str | None = None  # causal LM or sequence classifier; null: model.path


@dataclass(frozen=True)
class CriticConfig:
    """The value model of `adv_estimator: gae`; whatever is not here is as the actor's."""

    model: CriticModelConfig = CriticModelConfig()
    optim: RateConfig = RateConfig(lr=1e-5)
    cliprange_value: Positive = 0.5


@dataclass(frozen=True)
class KLControlConfig:
    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: NotNegative = 0.001
    horizon: Positive = 10_000.0  # adaptive: responses until the coefficient acts
    target_kl: Positive = 0.1  # adaptive: nats per token


@dataclass(frozen=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups whose responses all score alike are sampled anew."""

    enable: Flag = False
    metric: str = "score"  # or a further result of the reward, such as acc
    max_num_gen_batches: Count = 10  # then filled with groups without signal


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance weights and rejection against the gap between engine and trainer."""

    rollout_is: Literal["token", "sequence"] | None = "token"
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
    norm_adv_by_std_in_grpo: Flag = True
    gamma: Discount = 1.0
    lam: Discount = 1.0
    use_kl_in_reward: Flag = False
    kl_penalty: KLType = "kl"
    kl_ctrl: KLControlConfig = KLControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    mask_truncated_completions: Flag = False  # responses cut at the limit are not trained on


@dataclass(frozen=True)
class CustomRewardConfig:
    path: Texts = ()  # Python files, or "math_verify", the built-in rule
    name: Texts = ("compute_score",)


@dataclass(frozen=True)
class RewardManagerConfig:
    name: str = "naive"  # naive, batch, dapo, a registered name, or package.module.Class


@dataclass(frozen=True)
class RewardModelConfig:
    enable: Flag = False
    model_path: str = ""  # a sequence classifier with one label


@dataclass(frozen=True)
class OverlongBufferConfig:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13) over the last `len` tokens allowed."""

    enable: Flag = False
    len: Count = 128
    penalty_factor: NotNegative = 1.0


@dataclass(frozen=True)
class RewardConfig:
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    weights: tuple[Number, ...] | None = None  # of the functions, then of the model; null: all 1
    timeout_s: Positive = 60.0  # for one call of a function
    reward_manager: RewardManagerConfig = RewardManagerConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()

    @property
    def functions(self) -> list[tuple[str, str]]:
        """(file, function name) of every reward function; one name stands for all files."""
        paths, names = self.custom_reward_function.path, self.custom_reward_function.name
        return list(zip(paths, names * len(paths) if len(names) == 1 else names, strict=True))

    @property
    def all_weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * (len(self.functions) + self.reward_model.enable)


@dataclass(frozen=True)
class ReshardConfig:
    # LoRA: the engine gets weights with the adapters merged in, or the adapters beside the base.
    lora: Literal["merged", "adapters"] = "merged"


@dataclass(frozen=True)
class RunConfig:
    """What every kind of training says about its run."""

    total_epochs: Count = 1
    total_training_steps: Count | None = None  # null: from total_epochs
    test_freq: OrOff = -1  # validate every so many steps; -1: only at the end
    val_before_train: Flag = True
    save_freq: OrOff = -1  # checkpoint every so many steps; -1: none
    save_hf_model: Flag = False  # with every checkpoint also a Hugging Face folder
    max_actor_ckpt_to_keep: Count | None = None  # the newest, and the best
    resume_mode: Literal["auto", "disable", "path", "resume_path"] = "auto"
    resume_from_path: str | None = None  # a checkpoint folder, for resume_mode path
    default_local_dir: str = "runs/train"
    logger: tuple[Literal["console", "jsonl", "tensorboard", "wandb"], ...] = ("console", "jsonl")
    project_name: str = "hybridengine"
    experiment_name: str = "train"
    n_gpus_per_node: Count = 1  # ranks on this machine, CPU or GPU
    nnodes: Count = 1
    timeout_s: Positive = 600.0  # a collective slower than this ends the run

    def steps(self, per_epoch: int) -> int:
        """Of the whole run."""
        return self.total_training_steps or self.total_epochs * per_epoch


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    critic_warmup: Natural = 0  # steps that train the critic alone
    rollout_data_dir: str | None = None  # null: <default_local_dir>/rollouts


class JobConfig:
    """What the kinds of jobs have in common."""

    model: TrainedModelConfig
    trainer: RunConfig
    seed: int

    @property
    def sharding(self) -> ShardingConfig:
        raise NotImplementedError

    @property
    def sequence_parallel_size(self) -> int:
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        return self.trainer.n_gpus_per_node * self.trainer.nnodes

    @property
    def data_parallel_size(self) -> int:
        """How many different micro-batches run at once; the ranks of one share its sequences."""
        return self.world_size // self.sequence_parallel_size


@dataclass(frozen=True)
class GRPOConfig(JobConfig):
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    reshard: ReshardConfig = ReshardConfig()
    trainer: TrainerConfig = TrainerConfig(default_local_dir="runs/grpo", experiment_name="grpo")
    seed: Natural = 1

    @property
    def sharding(self) -> ShardingConfig:
        return self.actor.fsdp_config

    @property
    def sequence_parallel_size(self) -> int:
        return self.actor.ulysses_sequence_parallel_size

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its response."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens, that the engine is built for."""
        return self.rollout.max_model_len or self.longest

    @property
    def ppo_mini_batch_size(self) -> int:
        """Prompts per optimizer step; the whole batch where the config leaves it null."""
        return self.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def uses_reference(self) -> bool:
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def clip_ratios(self) -> tuple[float, float]:
        """(low, high), each falling back to `actor.clip_ratio`."""
        a = self.actor
        return a.clip_ratio_low or a.clip_ratio, a.clip_ratio_high or a.clip_ratio
