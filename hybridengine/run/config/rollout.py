"""The group `rollout` of an RL run; the rules are those of `hybridengine.run.config.common`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import StrictBool

from hybridengine.run.config.common import (
    CodePath,
    CodePaths,
    Dtype,
    Fraction,
    InFlight,
    InputPath,
    IntOrOff,
    NonNegativeFloat,
    NonNegativeInt,
    Numbers,
    Options,
    PositiveFloat,
    PositiveInt,
    Switch,
    Texts,
)


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

    @property
    def truncates(self) -> bool:
        """Whether responses are sampled from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0


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
