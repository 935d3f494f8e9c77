"""Every key of an RL run: type, limits, default and, as its comment, meaning.

The rules are those of `hybridengine.run.config.common`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from hybridengine.run.config.common import (
    CodePath,
    CodePaths,
    DatasetConfig,
    Dtype,
    FiniteFloat,
    Fraction,
    InFlight,
    InputPath,
    IntOrOff,
    JobConfig,
    NonNegativeFloat,
    NonNegativeInt,
    Numbers,
    OptimConfig,
    Options,
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
    Texts,
    TrainedModelConfig,
    UnitFloat,
)

_CovMode = Literal["clip_cov", "kl_cov"]
_DppoMode = Literal["dppo_tv", "dppo_kl"]
LossMode = Literal["vanilla", "gspo", "geo_mean", "cispo", "sapo", _DppoMode, "gpg", _CovMode]
_SeqAggMode = Literal["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LossAggMode = Literal["token-mean", "token-sum", _SeqAggMode]
KLType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: LossMode = "vanilla"  # see docs/algorithms.md


@dataclass(frozen=True)
class KLScheduleConfig:
    """How the coefficient of a KL term changes during a run."""

    type: Literal["fixed", "adaptive", "linear"] = "fixed"  # towards target_kl; to final_kl_coef
    horizon: PositiveFloat = 10_000.0  # adaptive: responses over which it adapts
    target_kl: PositiveFloat = 0.1  # adaptive: target, in nats per token
    final_kl_coef: NonNegativeFloat = 0.0  # linear: the coefficient from step num_steps on
    num_steps: PositiveInt | None = None  # linear: the last step of the change; null: of the run


@dataclass(frozen=True)
class KLControlConfig(KLScheduleConfig):
    kl_coef: NonNegativeFloat = 0.001  # coefficient of the KL penalty in the reward


@dataclass(frozen=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: replace groups whose responses all have the same score."""

    enable: StrictBool = False  # sample batches until enough groups differ in metric
    metric: str = "score"  # score, or another result of the reward, such as acc
    max_num_gen_batches: PositiveInt = 10  # at most; then keep groups without signal


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance weights and rejection against the gap between engine and trainer."""

    rollout_is: Literal["token", "sequence", "sequence_mean"] | None = "token"  # null: no weights
    rollout_is_threshold: float | str = 2.0  # truncation; "0.5_5": weights outside are 0
    rollout_rs: str | None = None  # criteria such as "seq_mean_k3", separated by commas
    rollout_rs_threshold: float | str | None = None  # one per criterion; k1: "lower_upper"
    rollout_is_batch_normalize: StrictBool = False  # divide the weights by their mean
    bypass_mode: StrictBool = False  # the engine's log-probs are the old ones: no forward for them
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"  # of bypass_mode

    @property
    def applies_weights(self) -> bool:
        """Whether the loss has importance weights: a clipped ratio to the engine needs none."""
        clips = self.bypass_mode and self.loss_type == "ppo_clip"
        return self.rollout_is is not None and not clips

    @property
    def is_bounds(self) -> tuple[float | None, float]:
        """Return (lower or None, upper) of the importance weights."""
        *lower, upper = _numbers(self.rollout_is_threshold)
        if upper < 1:  # YAML reads 0.5_5 without quotes as 0.55
            raise ValueError(f"rollout_is_threshold {upper} is below 1; quote a pair")
        return (lower[0] if lower else None), upper

    @property
    def rejection(self) -> dict[str, float | tuple[float, float]]:
        """Return, by criterion, the bound or (lower, upper)."""
        criteria = [c.strip() for c in (self.rollout_rs or "").split(",") if c.strip()]
        given = self.rollout_rs_threshold
        bounds = [] if given is None else [_numbers(part) for part in str(given).split(",")]
        paired = zip(criteria, bounds, strict=True)
        return {c: b[0] if len(b) == 1 else (b[0], b[1]) for c, b in paired}


@dataclass(frozen=True)
class ScoreCenteringConfig:
    """Subtract the engine's expected score from every token's (arXiv 2609.20807)."""

    enabled: StrictBool = False  # a constant advantage then has no gradient
    top_k: PositiveInt = 20  # most likely entries that the engine records of each token

    @property
    def num_likely(self) -> int:
        return self.top_k if self.enabled else 0


def _numbers(text: float | str) -> list[float]:
    """Parse "0.5_5" as [0.5, 5.0]; raise ValueError for other than one or two numbers."""
    numbers = [float(part) for part in str(text).split("_")]
    if len(numbers) > 2:
        raise ValueError(f"{text!r} is not one number or lower_upper")
    return numbers


@dataclass(frozen=True)
class DistillConfig:
    """On-policy distillation (arXiv 2306.13649): a teacher's distribution in place of a reward."""

    teacher_path: InputPath | None = None  # causal LM of the same vocabulary; null: off
    beta: UnitFloat = 0.5  # of the generalised JSD; 0: forward KL, 1: reverse KL
    temperature: PositiveFloat = 1.0  # of both distributions in the loss


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = "grpo"  # advantage estimator, or a registered one of your own
    norm_adv_by_std_in_grpo: StrictBool = True  # false: Dr.GRPO
    gdpo_reward_keys: Texts = ()  # declared rewards that gdpo normalises; none: all
    gdpo_reward_weights: Numbers | None = None  # weights of those; null: reward.weights
    gamma: UnitFloat = 1.0  # discount per token
    lam: UnitFloat = 1.0  # lambda of GAE
    use_kl_in_reward: StrictBool = False  # subtract a KL penalty per token
    kl_penalty: KLType = "kl"  # KL estimator of the penalty
    kl_ctrl: KLControlConfig = KLControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    score_centering: ScoreCenteringConfig = ScoreCenteringConfig()
    sampling_replay: Switch = "auto"  # log-probs over what sampling kept; auto: where it cuts
    mask_truncated_completions: StrictBool = False  # do not train on cut responses
    distill: DistillConfig = DistillConfig()


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
class SamplingConfig:
    """How validation samples; `do_sample: false` is greedy decoding."""

    n: PositiveInt = 1  # responses per prompt
    temperature: NonNegativeFloat = 0.0  # with do_sample
    top_p: Fraction = 1.0  # nucleus sampling; 1: off
    top_k: IntOrOff = -1  # sample from the k likeliest tokens; -1: off
    do_sample: StrictBool = False  # false: greedy decoding


@dataclass(frozen=True)
class EngineKwargsConfig:
    vllm: Options = field(default_factory=dict)  # more arguments of vllm.LLM(...)


@dataclass(frozen=True)
class MultiTurnConfig:
    """Trajectories of several turns, with tools or in an environment; see docs/multi_turn.md."""

    enable: StrictBool = False  # responses are trajectories of an agent loop
    max_assistant_turns: PositiveInt | None = None  # turns of the model; null: no limit
    max_user_turns: PositiveInt | None = None  # rounds of tool results or observations
    tool_config_path: InputPath | None = None  # YAML file of tools that are classes, as verl's
    function_tool_path: CodePaths = ()  # Python files of functions as tools, or file.py:function
    max_parallel_calls: PositiveInt = 1  # tool calls of one turn that are run; further ones are not
    max_tool_response_length: PositiveInt = 256  # characters of a tool's response; cut beyond
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"  # where it is cut
    format: str = "hermes"  # of calls: hermes, llama3_json, mistral, deepseek_v3, a parser of vLLM
    tool_timeout_s: PositiveFloat = 30.0  # limit of one call of a tool or environment
    max_concurrent_calls: PositiveInt = 64  # calls at once, per engine


@dataclass(frozen=True)
class AgentConfig:
    default_agent_loop: CodePath = "tool_agent"  # a registered name, file.py:Class or package.Class


@dataclass(frozen=True)
class RolloutConfig:
    name: Literal["auto", "vllm", "hf"] = "auto"  # auto: vllm where it is installed
    n: PositiveInt = 8  # responses per prompt (group size)
    temperature: PositiveFloat = 1.0  # sampling temperature
    top_p: Fraction = 1.0  # nucleus sampling; 1: off
    top_k: IntOrOff = -1  # sample from the k likeliest tokens; -1: off
    min_p: UnitFloat = 0.0  # least probability, as a part of the largest one; 0: off
    stop: Texts = ()  # texts that end a response; they are part of it
    tensor_model_parallel_size: PositiveInt = 1  # ranks that share one engine
    n_gpus_per_node: NonNegativeInt = 0  # engine ranks on a machine, unless trainer.mode is sync
    servers: Texts = ()  # URLs of vLLM servers that generate, in any trainer.mode
    gpu_memory_utilization: Fraction = 0.5  # of the GPU's memory, for the engine
    kv_cache_gib: PositiveFloat = 1.0  # KV cache per rank, on CPUs only
    in_flight_update: InFlight = "off"  # new weights during responses (async), which go on
    max_num_seqs: PositiveInt = 256  # sequences that one engine generates at once
    limit_images: PositiveInt | None = None  # images in one prompt; null: vLLM's own limit
    max_num_batched_tokens: PositiveInt | None = None  # tokens in one forward pass of the engine
    max_model_len: PositiveInt | None = None  # null: max_prompt_length + max_response_length
    enforce_eager: StrictBool = False  # engine without CUDA graphs and torch.compile
    enable_prefix_caching: StrictBool = True  # reuse the KV cache of equal prefixes
    enable_chunked_prefill: StrictBool = True  # process long prompts in chunks
    free_cache_engine: StrictBool = True  # free the engine's GPU memory during training
    dtype: Dtype = "auto"  # of the engine; auto: as fsdp_config.dtype
    exact: Switch = "auto"  # log-probs of engine and trainer are the same bits; docs/engine.md
    quantization: Literal["fp8"] | None = None  # fp8: vLLM's linear layers, in blocks of 128 x 128
    val_kwargs: SamplingConfig = SamplingConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    agent: AgentConfig = AgentConfig()
    engine_kwargs: EngineKwargsConfig = EngineKwargsConfig()


def truncates(sampling: Any) -> bool:
    """Return whether top_p, top_k or min_p of sampling settings remove vocabulary entries.

    sampling: a `RolloutConfig`, or settings of the same names; None and no min_p remove nothing.
    """
    return sampling.top_p < 1 or max(sampling.top_k or 0, getattr(sampling, "min_p", 0) or 0) > 0


@dataclass(frozen=True)
class CustomRewardConfig:
    path: CodePaths = ()  # Python files, built-in rules or URLs; none: by data_source
    name: Texts = ("compute_score",)  # names of the functions


@dataclass(frozen=True)
class RewardModuleConfig:
    path: CodePath | None = None  # Python file with the class reward_manager.name; null: none


@dataclass(frozen=True)
class RewardManagerConfig:
    name: str = "naive"  # naive, batch, dapo, a registered name, package.module.Class
    module: RewardModuleConfig = RewardModuleConfig()


@dataclass(frozen=True)
class RewardHttpConfig:
    """Requests to the URLs among `reward.custom_reward_function.path`."""

    batch_size: PositiveInt = 64  # responses in one request
    retries: NonNegativeInt = 3  # of a request that gets no answer, or status 429 or 5xx
    backoff_s: PositiveFloat = 1.0  # wait before the first retry; doubled before each further one


@dataclass(frozen=True)
class RewardModelConfig:
    enable: StrictBool = False  # add the score of a reward model
    model_path: InputPath = ""  # sequence classifier with one label


@dataclass(frozen=True)
class OverlongBufferConfig:
    """DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13)."""

    enable: StrictBool = False  # penalise responses close to the limit
    len: PositiveInt = 128  # the last tokens before data.max_response_length
    penalty_factor: NonNegativeFloat = 1.0  # penalty at the limit


@dataclass(frozen=True)
class RewardConfig:
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    weights: Numbers | None = None  # of the functions, then of the model; null: all 1
    timeout_s: PositiveFloat = 60.0  # limit of one call of a function, or of one request
    num_workers: PositiveInt | None = None  # processes or requests per rank; null: cores / ranks
    http: RewardHttpConfig = RewardHttpConfig()
    reward_manager: RewardManagerConfig = RewardManagerConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()

    @property
    def functions(self) -> list[tuple[str, str]]:
        """Return (file, function name) of every reward function; one name is for all files."""
        paths, names = self.custom_reward_function.path, self.custom_reward_function.name
        if not paths and not self.reward_model.enable:
            return [("data_source", "compute_score")]
        return list(zip(paths, names * len(paths) if len(names) == 1 else names, strict=True))

    @property
    def all_weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * (len(self.functions) + self.reward_model.enable)


@dataclass(frozen=True)
class ReshardConfig:
    lora: Literal["merged", "adapters"] = "merged"  # adapters: sync only them, as a LoRA of vLLM
    bucket_mib: PositiveInt | None = None  # staging buffer, two per rank; null: by free GPU memory
    delta: Switch = "auto"  # sync only elements whose bits changed; auto: over a link


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
        replays = self.algorithm.sampling_replay != "off" and truncates(self.rollout)
        return replays and not self.distills

    @property
    def clip_ratios(self) -> tuple[float, float]:
        """Return (low, high), each `actor.clip_ratio` where it is null."""
        a = self.actor
        return a.clip_ratio_low or a.clip_ratio, a.clip_ratio_high or a.clip_ratio
