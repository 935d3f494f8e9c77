"""Every key of an RL run: type, limits, default, and, as the comment beside it, its meaning.

The comments are part of the program: `hybridengine keys` prints them (`config.reference`).

A section whose defaults differ from its base class's is a class of its own: the default of a field
that holds a section is always that section's class without arguments. Otherwise a config that sets
one key of the section would lose the other defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from hybridengine.config.types import (
    Count,
    Discount,
    Dtype,
    Flag,
    KLLossType,
    KLType,
    Loggers,
    Natural,
    NotNegative,
    Number,
    Options,
    OrOff,
    PathText,
    PathTexts,
    Positive,
    Seed,
    Share,
    Texts,
    Truncation,
)

__all__ = ["GRPOConfig", "JobConfig"]


@dataclass(frozen=True)
class TrainedModelConfig:
    path: PathText = ""  # a Hugging Face folder, or a name in the local cache or the hub
    trust_remote_code: Flag = False  # run Python code that comes with the model
    enable_gradient_checkpointing: Flag = False  # recompute layers in backward: less memory
    use_fused_kernels: Flag = True  # log-probs straight from hidden states; false: whole logits
    lora_rank: Natural = 0  # 0: all weights are trained
    lora_alpha: Positive = 16.0  # adapters are scaled by lora_alpha / lora_rank
    target_modules: str | tuple[str, ...] = "all-linear"  # or names of linear layers


@dataclass(frozen=True)
class ModelConfig(TrainedModelConfig):
    external_lib: PathText | None = None  # Python file or module that registers estimators, rewards


@dataclass(frozen=True)
class DataConfig:
    train_files: PathTexts = ()  # prompts: files, folders or globs
    val_files: PathTexts | None = None  # null: no validation at all
    prompt_key: str = "prompt"  # column of the chat
    reward_fn_key: str = "data_source"  # column that the reward gets as data_source
    train_batch_size: Count = 64  # prompts per step
    val_batch_size: Count | None = None  # prompts per call; null: all at once
    max_prompt_length: Count = 512  # tokens
    max_response_length: Count = 512  # tokens
    truncation: Truncation = "error"  # of longer prompts: refuse, or cut at the left or right
    filter_overlong_prompts: Flag = False  # drop, and count, prompts above max_prompt_length
    shuffle: Flag = True  # a new order every epoch, by seed
    chat_template: PathText | None = None  # Jinja text or a file; null: the tokenizer's own
    apply_chat_template_kwargs: Options = field(default_factory=dict)  # for the chat template


@dataclass(frozen=True)
class RateConfig:
    lr: Positive = 1e-6  # learning rate of AdamW
    lr_warmup_steps: OrOff = -1  # linear from 0; -1: by lr_warmup_steps_ratio
    lr_warmup_steps_ratio: Discount = 0.0  # of all steps

    def warmup_steps(self, total_steps: int) -> int:
        """In optimizer steps."""
        steps = self.lr_warmup_steps
        return steps if steps >= 0 else round(self.lr_warmup_steps_ratio * total_steps)


@dataclass(frozen=True)
class OptimConfig(RateConfig):
    weight_decay: NotNegative = 0.01  # on every parameter
    betas: tuple[Discount, Discount] = (0.9, 0.999)  # of AdamW
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up


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
    ] = "vanilla"  # fmt: skip  # docs/algorithms.md describes them


@dataclass(frozen=True)
class ActorConfig:
    ppo_mini_batch_size: Count | None = None  # prompts per optimizer step; null: all
    ppo_epochs: Count = 1  # passes over each batch of rollouts
    ppo_max_token_len_per_gpu: Count = 16384  # tokens in one micro-batch
    clip_ratio: Positive = 0.2  # of the probability ratio, to both sides
    clip_ratio_low: Share | None = None  # null: clip_ratio
    clip_ratio_high: Positive | None = None  # null: clip_ratio
    clip_ratio_c: Annotated[float, Field(gt=1, strict=True)] = 3.0  # for negative advantages
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ] = "token-mean"  # fmt: skip  # …-norm: divided by data.max_response_length (Dr.GRPO)
    entropy_coeff: Number = 0.0  # of the entropy bonus in the loss
    use_kl_loss: Flag = False  # a KL term against the reference in the loss
    kl_loss_coef: NotNegative = 0.001  # of that term
    kl_loss_type: KLLossType = "low_var_kl"  # estimator of that term; +: with its own gradient
    grad_clip: Positive = 1.0  # global gradient norm; the critic's too
    ulysses_sequence_parallel_size: Count = 1  # ranks that share a micro-batch
    fsdp_config: FsdpConfig = FsdpConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    optim: OptimConfig = OptimConfig()


@dataclass(frozen=True)
class SamplingConfig:
    """How validation samples; `do_sample: false` is greedy decoding."""

    n: Count = 1  # responses per prompt
    temperature: NotNegative = 0.0  # for do_sample
    top_p: Share = 1.0  # 1: off
    top_k: OrOff = -1  # -1: off
    do_sample: Flag = False  # false: greedy


@dataclass(frozen=True)
class EngineKwargsConfig:
    vllm: Options = field(default_factory=dict)  # more arguments of vllm.LLM(...)


@dataclass(frozen=True)
class RolloutConfig:
    name: Literal["auto", "vllm", "hf"] = "auto"  # auto: vllm where installed
    n: Count = 8  # responses per prompt: the group
    temperature: Positive = 1.0  # of sampling
    top_p: Share = 1.0  # 1: off
    top_k: OrOff = -1  # -1: off
    stop: Texts = ()  # texts that end a response, in validation too; they stay in it
    tensor_model_parallel_size: Count = 1  # ranks that share one engine
    gpu_memory_utilization: Share = 0.5  # of a GPU's memory, for the engine
    kv_cache_gib: Positive = 1.0  # per rank, on a CPU only
    max_num_seqs: Count = 256  # sequences generated at once by one engine
    max_num_batched_tokens: Count = 8192  # tokens in one pass of the engine
    max_model_len: Count | None = None  # null: prompt + response limit
    enforce_eager: Flag = False  # no CUDA graphs and no torch.compile in the engine
    enable_prefix_caching: Flag = True  # responses of one prompt share its keys and values
    enable_chunked_prefill: Flag = True  # long prompts in parts, between decoding steps
    free_cache_engine: Flag = True  # on a GPU the engine's memory is the trainer's while it trains
    dtype: Dtype = "auto"  # of the engine's weights and compute; auto: as fsdp_config.dtype
    val_kwargs: SamplingConfig = SamplingConfig()
    engine_kwargs: EngineKwargsConfig = EngineKwargsConfig()


@dataclass(frozen=True)
class CriticModelConfig:
    path: PathText | None = None  # causal LM or sequence classifier; null: model.path


@dataclass(frozen=True)
class CriticOptimConfig(RateConfig):
    lr: Positive = 1e-5  # learning rate of AdamW


@dataclass(frozen=True)
class CriticConfig:
    """The value model of `adv_estimator: gae`; whatever is not here is as the actor's."""

    model: CriticModelConfig = CriticModelConfig()
    optim: CriticOptimConfig = CriticOptimConfig()
    cliprange_value: Positive = 0.5  # how far a value moves from the old one in one update


@dataclass(frozen=True)
class KLControlConfig:
    type: Literal["fixed", "adaptive"] = "fixed"  # adaptive: towards target_kl
    kl_coef: NotNegative = 0.001  # of the KL penalty in the reward
    horizon: Positive = 10_000.0  # adaptive: responses until the coefficient acts
    target_kl: Positive = 0.1  # adaptive: nats per token


@dataclass(frozen=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups whose responses all score alike are sampled anew."""

    enable: Flag = False  # sample further batches until enough groups have signal
    metric: str = "score"  # or a further result of the reward, such as acc
    max_num_gen_batches: Count = 10  # then filled with groups without signal


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance weights and rejection against the gap between engine and trainer."""

    rollout_is: Literal["token", "sequence"] | None = "token"  # level of the weights; null: off
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
    adv_estimator: str = "grpo"  # a name of hybridengine.trainer.algorithms, or one of your own
    norm_adv_by_std_in_grpo: Flag = True  # false: as Dr.GRPO
    gdpo_reward_keys: Texts = ()  # results of the reward that gdpo normalises; none: its functions
    gdpo_reward_weights: tuple[Number, ...] | None = None  # of those; null: reward.weights, else 1
    gamma: Discount = 1.0  # discount per token
    lam: Discount = 1.0  # of GAE
    use_kl_in_reward: Flag = False  # subtract a KL penalty per token from the reward
    kl_penalty: KLType = "kl"  # estimator of that penalty
    kl_ctrl: KLControlConfig = KLControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    mask_truncated_completions: Flag = False  # responses cut at the limit are not trained on


@dataclass(frozen=True)
class CustomRewardConfig:
    path: PathTexts = ()  # Python files, or built-in rules; none: by data_source
    name: Texts = ("compute_score",)  # of the functions in them


@dataclass(frozen=True)
class RewardManagerConfig:
    name: str = "naive"  # naive, batch, dapo, a registered name, or package.module.Class


@dataclass(frozen=True)
class RewardModelConfig:
    enable: Flag = False  # add a model's score
    model_path: PathText = ""  # a sequence classifier with one label


@dataclass(frozen=True)
class OverlongBufferConfig:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13) over the last `len` tokens allowed."""

    enable: Flag = False  # punish responses close to the limit
    len: Count = 128  # tokens before data.max_response_length
    penalty_factor: NotNegative = 1.0  # subtracted at the limit


@dataclass(frozen=True)
class RewardConfig:
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    weights: tuple[Number, ...] | None = None  # of the functions, then of the model; null: all 1
    timeout_s: Positive = 60.0  # for one call of a function
    num_workers: Count | None = None  # processes per rank; null: the machine's cores over its ranks
    reward_manager: RewardManagerConfig = RewardManagerConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()

    @property
    def functions(self) -> list[tuple[str, str]]:
        """(file, function name) of every reward function; one name stands for all files."""
        paths, names = self.custom_reward_function.path, self.custom_reward_function.name
        if not paths and not self.reward_model.enable:
            return [("data_source", "compute_score")]
        return list(zip(paths, names * len(paths) if len(names) == 1 else names, strict=True))

    @property
    def all_weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * (len(self.functions) + self.reward_model.enable)


@dataclass(frozen=True)
class ReshardConfig:
    lora: Literal["merged", "adapters"] = "merged"  # adapters: sent alone into vLLM's LoRA slot


@dataclass(frozen=True)
class RunConfig:
    """What every kind of training says about its run."""

    total_epochs: Count = 1  # over the training data
    total_training_steps: Count | None = None  # null: from total_epochs
    test_freq: OrOff = -1  # validate every so many steps; -1: only at the end
    val_before_train: Flag = True  # validate before the first step
    save_freq: OrOff = -1  # checkpoint every so many steps; -1: none
    save_hf_model: Flag = False  # with every checkpoint also a Hugging Face folder
    max_actor_ckpt_to_keep: Count | None = None  # the newest, and the best
    resume_mode: Literal["auto", "disable", "path", "resume_path"] = "auto"  # auto: the newest
    resume_from_path: PathText | None = None  # a checkpoint folder, for resume_mode path
    default_local_dir: PathText = "runs/train"  # the run's folder
    logger: Loggers = ("console", "jsonl")  # where metrics go
    project_name: str = "hybridengine"  # in wandb
    experiment_name: str = "train"  # in wandb
    n_gpus_per_node: Count = 1  # ranks on this machine, CPU or GPU
    nnodes: Count = 1  # machines, each started under torchrun
    timeout_s: Positive = 600.0  # a collective slower than this ends the run

    def steps(self, per_epoch: int) -> int:
        """Of the whole run."""
        return self.total_training_steps or self.total_epochs * per_epoch


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    default_local_dir: PathText = "runs/grpo"  # the run's folder
    experiment_name: str = "grpo"  # in wandb
    critic_warmup: Natural = 0  # steps that train the critic alone
    rollout_data_dir: PathText | None = None  # null: <default_local_dir>/rollouts
    rollout_freq: OrOff = 1  # write the rollouts of every so many steps; -1: none


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
    trainer: TrainerConfig = TrainerConfig()
    seed: Seed = 1  # of data order, sampling and initial adapters

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
