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


@dataclass(frozen=True)
class ModelConfig:
    path: str = ""  # a Hugging Face folder, or a name in the local cache or the hub
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = False


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
    lr_scheduler_type: str = _setting("constant", choices=("constant", "cosine"))


@dataclass(frozen=True)
class WrapPolicyConfig:
    min_num_params: int = _setting(0, at_least=0)  # of an FSDP group; 0: one per decoder layer


@dataclass(frozen=True)
class FsdpConfig:
    fsdp_size: int = _setting(-1, at_least=-1)  # ranks that share one copy of the model; -1: all
    dtype: str = _setting("bfloat16", choices=("bfloat16", "float16", "float32"))  # of the compute
    param_offload: bool = False  # weights wait in host memory while the engine generates
    optimizer_offload: bool = False  # Adam's moments are on the device during the step only
    reshard_after_forward: bool = True  # false: keep gathered weights until their backward
    forward_prefetch: bool = False  # gather the next layer's weights during this one's forward
    wrap_policy: WrapPolicyConfig = field(default_factory=WrapPolicyConfig)


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
        ),
    )


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
            "seq-mean-token-sum",
            "seq-mean-token-mean",
            "seq-mean-token-sum-norm",  # Dr.GRPO: divided by data.max_response_length
        ),
    )
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = _setting(0.001, at_least=0)
    kl_loss_type: str = _setting(
        "low_var_kl", choices=("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
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
class AlgorithmConfig:
    adv_estimator: str = _setting(
        "grpo", choices=("grpo", "dr_grpo", "rloo", "grpo_passk", "max_mean", "opo")
    )
    norm_adv_by_std_in_grpo: bool = True


@dataclass(frozen=True)
class CustomRewardConfig:
    path: str = ""  # a Python file
    name: str = "compute_score"


@dataclass(frozen=True)
class RewardConfig:
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)


@dataclass(frozen=True)
class ReshardConfig:
    # Staging memory of one all-to-all of a weight sync; at most two are alive at a time.
    bucket_bytes: int = _setting(64 * 2**20, at_least=4096)


@dataclass(frozen=True)
class TrainerConfig:
    total_epochs: int = _setting(1, at_least=1)
    total_training_steps: int | None = _setting(None, at_least=1)  # null: from total_epochs
    test_freq: int = _setting(-1, at_least=-1)  # validate every so many steps; -1: only at the end
    val_before_train: bool = True
    save_freq: int = _setting(-1, at_least=-1)  # save every so many steps; -1: only at the end
    default_local_dir: str = "runs/grpo"
    logger: tuple[str, ...] = _setting(
        ("console", "jsonl"), choices=("console", "jsonl", "tensorboard")
    )
    project_name: str = "hybridengine"
    experiment_name: str = "grpo"
    n_gpus_per_node: int = _setting(1, at_least=1)  # ranks on this machine, CPU or GPU
    nnodes: int = _setting(1, at_least=1)
    rollout_data_dir: str | None = None  # null: <default_local_dir>/rollouts
    timeout_s: float = _setting(600.0, above=0)  # a collective slower than this ends the run


@dataclass(frozen=True)
class GRPOConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
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
    def clip_ratios(self) -> tuple[float, float]:
        """(low, high), each falling back to `actor.clip_ratio`."""
        a = self.actor
        low = a.clip_ratio if a.clip_ratio_low is None else a.clip_ratio_low
        return low, a.clip_ratio if a.clip_ratio_high is None else a.clip_ratio_high
