"""Every key of an RL run: type, limits, default and, as its comment, meaning.

The rules are those of `hybridengine.run.config.common`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, StrictBool

from hybridengine.run.config.algorithm import (
    AlgorithmConfig,
    KLScheduleConfig,
    KLType,
    LossAggMode,
    PolicyLossConfig,
)
from hybridengine.run.config.common import (
    CodePath,
    DatasetConfig,
    FiniteFloat,
    InputPath,
    IntOrOff,
    JobConfig,
    NonNegativeFloat,
    NonNegativeInt,
    OptimConfig,
    OutputPath,
    PathText,
    PolicyConfig,
    PositiveFloat,
    PositiveInt,
    RateConfig,
    ReplayedRoutes,
    RunConfig,
    Seed,
    ShardingConfig,
    Switch,
    TrainedModelConfig,
)
from hybridengine.run.config.reward import RewardConfig
from hybridengine.run.config.rollout import RolloutConfig

AboveOne = Annotated[float, Field(gt=1, strict=True)]
KLLossType = Literal[KLType, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]


@dataclass(frozen=True)
class ModelConfig(TrainedModelConfig):
    share_engine_weights: Switch = "auto"  # compute with the engine's weights, gather none
    external_lib: CodePath | None = None  # file or module that registers estimators, rewards


@dataclass(frozen=True)
class DataConfig(DatasetConfig):
    prompt_key: str = "prompt"  # column of the chat
    reward_fn_key: str = "data_source"  # column passed to the reward as data_source
    train_batch_size: PositiveInt = 64  # prompts per step
    val_batch_size: PositiveInt | None = None  # prompts per generation call; null: all
    max_prompt_length: PositiveInt = 512  # in tokens
    max_response_length: PositiveInt = 512  # in tokens; multi-turn: of all turns together


@dataclass(frozen=True)
class FsdpConfig(ShardingConfig):
    param_offload: StrictBool = False  # weights in host memory during generation


@dataclass(frozen=True)
class ActorConfig(PolicyConfig):
    ppo_mini_batch_size: PositiveInt | None = None  # prompts per optimizer step; null: all
    ppo_epochs: PositiveInt = 1  # passes over each batch of rollouts
    ppo_max_token_len_per_gpu: PositiveInt = 16384  # tokens in one micro-batch
    shared_prefix: Switch = "auto"  # compute a prompt once for its responses; auto: if possible
    router_replay: ReplayedRoutes = "off"  # experts: of the engine, of old log-probs; docs/moe.md
    clip_ratio: PositiveFloat = 0.2  # clip range of the probability ratio
    clip_ratio_low: PositiveFloat | None = None  # null: clip_ratio; 1 or more: no lower bound
    clip_ratio_high: PositiveFloat | None = None  # null: clip_ratio
    clip_ratio_c: AboveOne = 3.0  # dual-clip bound for negative advantages
    loss_agg_mode: LossAggMode = "token-mean"  # …-norm: by data.max_response_length (Dr.GRPO)
    entropy_coeff: FiniteFloat = 0.0  # coefficient of the entropy bonus
    use_kl_loss: StrictBool = False  # add a KL term against the reference to the loss
    kl_loss_coef: NonNegativeFloat = 0.001  # coefficient of the KL term
    kl_loss_type: KLLossType = "low_var_kl"  # KL estimator; +: k2's gradient (straight-through)
    kl_loss_ctrl: KLScheduleConfig = field(default_factory=KLScheduleConfig)
    grad_clip: PositiveFloat = 1.0  # maximum global gradient norm, the critic's too
    ulysses_sequence_parallel_size: PositiveInt = 1  # ranks that share a micro-batch
    deterministic: StrictBool = False  # a GPU adds gradients in a fixed order, also in attention
    fsdp_config: FsdpConfig = FsdpConfig()
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True)
class CriticModelConfig:
    path: InputPath | None = None  # causal LM or sequence classifier; null: model.path


@dataclass(frozen=True)
class CriticOptimConfig(RateConfig):
    lr: PositiveFloat = 1e-5  # learning rate of AdamW


@dataclass(frozen=True)
class CriticConfig:
    """The value model of `adv_estimator: gae`; all other settings are the actor's."""

    n_gpus_per_node: NonNegativeInt = 0  # ranks of the critic alone on a machine; 0: the actor's
    model: CriticModelConfig = CriticModelConfig()
    optim: CriticOptimConfig = CriticOptimConfig()
    cliprange_value: PositiveFloat = 0.5  # clip range of a value around the old one


@dataclass(frozen=True)
class ReshardConfig:
    lora: Literal["merged", "adapters"] = "merged"  # adapters: sync only them, as a LoRA of vLLM
    bucket_mib: PositiveInt | None = None  # staging buffer, two per rank; null: by free GPU memory
    delta: Switch = "auto"  # sync only elements whose bits changed; auto: where it is faster


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    default_local_dir: PathText = "runs/grpo"  # the run's folder
    experiment_name: str = "grpo"  # run in wandb, MLflow
    mode: Literal["sync", "one_step_off", "async"] = "sync"  # engine ranks generate during training
    staleness: NonNegativeInt = 1  # updates that rollouts may be behind, unless mode is sync
    critic_warmup: NonNegativeInt = 0  # first steps, in which only the critic is trained
    rollout_data_dir: OutputPath | None = None  # null: <default_local_dir>/rollouts
    rollout_freq: IntOrOff = 1  # steps between written rollouts; -1: none


@dataclass(frozen=True)
class RLConfig(JobConfig):
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reshard: ReshardConfig = ReshardConfig()
    trainer: TrainerConfig = TrainerConfig()
    seed: Seed = 1  # of data order, sampling and initial adapters

    kind, policy_group = "grpo", "actor"

    @property
    def overlaps(self) -> bool:
        """Whether other ranks than those that train, or servers, generate."""
        return self.trainer.mode != "sync" or bool(self.rollout.servers)

    @property
    def staleness(self) -> int:
        """How many updates rollouts may be behind."""
        return 0 if self.trainer.mode == "sync" else self.trainer.staleness

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a machine that train, generate, or have the critic alone."""
        trainers, critics = self.trainer.n_gpus_per_node, self.critic.n_gpus_per_node
        return trainers + self.engine_ranks_per_node + critics

    @property
    def engine_ranks_per_node(self) -> int:
        """Ranks of a machine that do not train; with servers, one that sends them requests."""
        if self.rollout.servers:
            return 1
        return self.rollout.n_gpus_per_node if self.overlaps else 0

    @property
    def num_critic_ranks(self) -> int:
        """Ranks of the critic alone; 0: it is on those of the actor."""
        return self.critic.n_gpus_per_node * self.trainer.nnodes

    @property
    def num_engines(self) -> int:
        if self.rollout.servers:
            return len(self.rollout.servers)
        engine_ranks = self.engine_ranks_per_node * self.trainer.nnodes
        return (engine_ranks or self.world_size) // self.rollout.tensor_model_parallel_size

    @property
    def sequence_parallel_size(self) -> int:
        return self.actor.ulysses_sequence_parallel_size

    @property
    def deterministic(self) -> bool:
        return self.actor.deterministic

    @property
    def max_sequence_length(self) -> int:
        """The longest prompt with its response, in tokens."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def max_model_len(self) -> int:
        """The longest sequence of the engine, in tokens."""
        return self.rollout.max_model_len or self.max_sequence_length

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens in one forward pass of the engine: null means 8192, or more if one prompt needs
        more because prompts are not processed in chunks."""
        if (given := self.rollout.max_num_batched_tokens) is not None:
            return given
        return 8192 if self.rollout.enable_chunked_prefill else max(8192, self.max_model_len)

    @property
    def ppo_mini_batch_size(self) -> int:
        """Prompts per optimizer step; null means the full batch."""
        return self.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def uses_reference(self) -> bool:
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def distills(self) -> bool:
        """Whether the loss is the divergence from a teacher."""
        return self.algorithm.distill.teacher_path is not None

    @property
    def schedules_kl_loss(self) -> bool:
        """Whether the coefficient of the KL loss changes, and is part of a checkpoint."""
        return self.actor.use_kl_loss and self.actor.kl_loss_ctrl.type != "fixed"

    @property
    def replays_sampling(self) -> bool:
        """Whether the trainer's distributions are over the entries that sampling kept."""
        replays = self.algorithm.sampling_replay != "off" and self.rollout.truncates
        return replays and not self.distills

    @property
    def clip_ratios(self) -> tuple[float, float]:
        """Return (low, high), each `actor.clip_ratio` where it is null."""
        a = self.actor
        return a.clip_ratio_low or a.clip_ratio, a.clip_ratio_high or a.clip_ratio
