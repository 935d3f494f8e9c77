"""Types of settings, the groups of keys that every kind of job has, and those of SFT.

The comment after a key is its meaning: `hybridengine keys` prints it.

A group whose defaults differ from its base class's is a class of its own: the default of a field
that holds a group is always that group's class without arguments. Otherwise setting one key of the
group would change the defaults of its other keys.
"""

from __future__ import annotations

import functools
import glob
import os
import os.path
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool


@dataclass(frozen=True)
class ReadPath:
    """Marks a key whose value names what a job reads.

    contains: part of every value that is a path; others are names.
    """

    contains: str = ""


_type_hints = functools.cache(  # most of the time of a load, else
    functools.partial(typing.get_type_hints, include_extras=True)
)


def keys_of(group: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a config class with its type."""
    hints = _type_hints(group)
    for f in fields(group):
        if is_dataclass(hints[f.name]):
            yield from keys_of(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", hints[f.name]


def read_paths(types: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that `ReadPath` marks, each with what its paths contain.

    types: key → type.
    """

    def marks(hint: Any) -> Iterator[ReadPath]:
        yield from (x for x in getattr(hint, "__metadata__", ()) if isinstance(x, ReadPath))
        for argument in get_args(hint):
            yield from marks(argument)

    return {key: mark.contains for key, hint in types.items() for mark in marks(hint)}


def find_input(value: Any, contains: str, folders: Sequence[Path]) -> Any:
    """Return a path, or each path of a list, as the absolute one of the first folder that has it.

    Other values, and paths that no folder has, stay as they are.

    contains: see `ReadPath`.
    folders: those that are searched after the working directory.
    """
    if isinstance(value, list):
        return [find_input(item, contains, folders) for item in value]
    if not isinstance(value, str) or not value or contains not in value or "{" in value:
        return value  # no path, or the text of a template
    path = os.path.expanduser(value)
    file = re.sub(r"(?<=\.py):\w+$", "", path)  # without the name of an object in it
    for folder in (Path.cwd(), *folders):
        if os.path.exists(folder / file) or any(glob.iglob(file, root_dir=folder)):
            return str(folder / path)
    return value


PositiveInt = Annotated[int, Field(ge=1, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
IntOrOff = Annotated[int, Field(ge=-1, strict=True)]  # -1: off, or all
Seed = Annotated[int, Field(ge=0, le=2**32 - 1, strict=True)]  # numpy and vLLM take 32 bits
FiniteFloat = Annotated[float, Field(strict=True, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1, strict=True)]
UnitFloat = Annotated[float, Field(ge=0, le=1, strict=True)]


def _as_list(value: Any) -> Any:
    """Return a single text as a list of one."""
    return ((value,) if value else ()) if isinstance(value, str) else value


def _expand_home(value: Any) -> Any:
    """Replace a leading `~` by the home folder, in one path or in each of several."""
    if isinstance(value, tuple):
        return tuple(map(_expand_home, value))
    return os.path.expanduser(value) if isinstance(value, str) else value


def _as_switch(value: Any) -> Any:
    """Return YAML's booleans as the words that it reads as them."""
    return ("off", "on")[value] if isinstance(value, bool) else value


Numbers = tuple[FiniteFloat, ...]
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
PathText = Annotated[str, AfterValidator(_expand_home)]
OutputPath = Annotated[PathText, AfterValidator(os.path.abspath)]
InputPath = Annotated[PathText, ReadPath()]
InputPaths = Annotated[Texts, AfterValidator(_expand_home), ReadPath()]
CodePath = Annotated[PathText, ReadPath(".py")]  # file.py, file.py:name or the name of a module
CodePaths = Annotated[Texts, AfterValidator(_expand_home), ReadPath(".py")]
Options = Mapping[str, Any]  # any keys, passed on to another library
Logger = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow"]
Loggers = Annotated[tuple[Logger, ...], BeforeValidator(_as_list)]
Truncation = Literal["error", "left", "right"]
SpecialTokensInData = Literal["text", "allow", "error"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_switch)]
InFlight = Annotated[Literal["off", "keep_kv", "recompute_kv"], BeforeValidator(_as_switch)]
ReplayedRoutes = Annotated[Literal["off", "rollout", "old"], BeforeValidator(_as_switch)]
SharedFactors = Literal["none", "outer", "all"]
Schedule = Literal["constant", "linear", "cosine"]
ResumeMode = Literal["auto", "disable", "path", "resume_path"]


@dataclass(frozen=True)
class OverrideConfig:
    """Entries of the model's config.json with other values, in the engine and in exports too."""

    max_position_embeddings: PositiveInt | None = None  # longest sequence; null: config.json's


@dataclass(frozen=True)
class TrainedModelConfig:
    path: InputPath = ""  # a Hugging Face folder, or a name in the local cache or the hub
    trust_remote_code: StrictBool = False  # run Python code that comes with the model
    enable_gradient_checkpointing: StrictBool = False  # recompute layers in backward: less memory
    use_fused_kernels: StrictBool = True  # log-probs from hidden states; false: from full logits
    compile: StrictBool = False  # torch.compile of the decoder layers: fewer, larger kernels
    cuda_graphs: StrictBool = False  # CUDA graphs of the decoder: less host time per micro-batch
    lora_rank: NonNegativeInt = 0  # rank of the LoRA adapters; 0: train all weights
    lora_alpha: PositiveFloat = 16.0  # adapters are scaled by lora_alpha / lora_rank
    target_modules: str | tuple[str, ...] = "all-linear"  # names of the layers that get adapters
    target_parameters: Texts = ()  # fused experts that get adapters, such as experts.down_proj
    share_expert_adapters: SharedFactors = "none"  # factors that all experts of a layer share
    lora_adapter_path: InputPath | None = None  # PEFT folder to start from, with its rank and scale
    override_config: OverrideConfig = OverrideConfig()
    keep_vision_tower: StrictBool = False  # qwen3_5, gemma4, mistral3: train with images

    @property
    def config_overrides(self) -> dict[str, int]:
        """Return the entries of config.json that have other values."""
        return {name: value for name, value in asdict(self.override_config).items() if value}

    def at(self, path: str | None) -> Self:
        """Return the group for another model of the job, which has its own config.json.

        path: of that model; None or empty: this one.
        """
        if not path or path == self.path:
            return self
        return replace(self, path=path, override_config=OverrideConfig())


@dataclass(frozen=True)
class DatasetConfig:
    train_files: InputPaths = ()  # files, folders or globs
    val_files: InputPaths | None = None  # null: no validation at all
    truncation: Truncation = "error"  # of longer rows: an error, or cut at the left or right
    filter_overlong_prompts: StrictBool = False  # drop longer rows
    shuffle: StrictBool = True  # a new order every epoch, by seed
    chat_template: InputPath | None = None  # Jinja text or a file; null: the tokenizer's own
    apply_chat_template_kwargs: Options = field(default_factory=dict)  # variables of the template
    tools_key: str = "tools"  # column of tool schemas, where a row has it
    enable_thinking_key: str = "enable_thinking"  # column of that variable, where a row has it
    special_tokens: SpecialTokensInData = "text"  # <|im_end|> in a message; allow: a control token
    image_key: str = "images"  # column of a row's images, where it has any; docs/vision.md
    mm_processor_kwargs: Options = field(default_factory=dict)  # of the model's image processor


@dataclass(frozen=True)
class RateConfig:
    lr: PositiveFloat = 1e-6  # learning rate
    lr_warmup_steps: IntOrOff = -1  # linear warm-up; -1: by lr_warmup_steps_ratio
    lr_warmup_steps_ratio: UnitFloat = 0.0  # warm-up as a part of all steps

    def warmup_steps(self, total_steps: int) -> int:
        """Return the optimizer steps of the warm-up."""
        steps = self.lr_warmup_steps
        return steps if steps >= 0 else round(self.lr_warmup_steps_ratio * total_steps)


@dataclass(frozen=True)
class OptimConfig(RateConfig):
    name: str = "adamw"  # adamw, or an extra's optimizer: muon
    override_optimizer_config: Options = field(default_factory=dict)  # options of muon
    weight_decay: NonNegativeFloat = 0.01  # decoupled weight decay, on every parameter
    betas: tuple[UnitFloat, UnitFloat] = (0.9, 0.999)  # decay rates of AdamW's moments
    lr_scheduler_type: Schedule = "constant"  # of the learning rate, after the warm-up
    min_lr_ratio: UnitFloat = 0.0  # of lr, at which a linear or cosine schedule ends


@dataclass(frozen=True)
class WrapPolicyConfig:
    min_num_params: NonNegativeInt = 0  # smallest FSDP group; 0: one per layer


@dataclass(frozen=True)
class ShardingConfig:
    fsdp_size: IntOrOff = -1  # ranks that share one copy of the model; -1: all
    expert_parallel_size: PositiveInt = 1  # ranks over which the policy's experts are divided
    dtype: Dtype = "auto"  # compute type; auto: bfloat16 where it is fast, else float32
    optimizer_offload: StrictBool = False  # AdamW's moments in host memory between steps
    reshard_after_forward: Switch = "auto"  # off: keep gathered weights; auto: above 2 GiB
    forward_prefetch: StrictBool = False  # gather the next layer's weights early
    wrap_policy: WrapPolicyConfig = WrapPolicyConfig()

    @property
    def param_offload(self) -> bool:
        """Whether weights are in host memory during generation; a key of RL."""
        return False

    @property
    def offload_policy(self) -> bool:
        """Whether shards, gradients and the optimizer are in host memory; a key of SFT."""
        return False


@dataclass(frozen=True)
class PolicyConfig:
    """Which parts of the policy are trained, and how it is sharded (docs/moe.md for routers).

    The keys are in the group `actor`, of SFT in `model`.
    """

    router_aux_loss_coef: NonNegativeFloat = 0.0  # load-balancing loss of a mixture; 0: none
    router_z_loss_coef: NonNegativeFloat = 0.0  # loss of large router logits; 0: none
    router_bias_update_rate: NonNegativeFloat = 0.0  # balance by e_score_correction_bias; 0: none
    freeze_moe_router: StrictBool = False  # do not train the routers
    freeze_vision_tower: StrictBool = False  # of a vision-language model; docs/vision.md
    fsdp_config: ShardingConfig = ShardingConfig()


@dataclass(frozen=True)
class RunConfig:
    """The group `trainer` of every kind of job."""

    total_epochs: PositiveInt = 1  # passes over the training data
    total_training_steps: PositiveInt | None = None  # null: from total_epochs
    test_freq: IntOrOff = -1  # steps between validations; -1: only at the end
    val_before_train: StrictBool = True  # also validate before the first step
    save_freq: IntOrOff = -1  # steps between checkpoints; -1: none
    save_hf_model: StrictBool = False  # also write a Hugging Face folder with every checkpoint
    save_dtype: Dtype = "auto"  # of final/ and Hugging Face folders; auto: as fsdp_config.dtype
    max_actor_ckpt_to_keep: PositiveInt | None = None  # the newest and the best; null: all
    resume_mode: ResumeMode = "auto"  # auto: the newest checkpoint
    resume_from_path: InputPath | None = None  # a checkpoint folder, for resume_mode path
    default_local_dir: PathText = "runs/train"  # the run's folder
    logger: Loggers = ("console", "jsonl")  # where metrics go
    project_name: str = "hybridengine"  # project in wandb, experiment in MLflow
    experiment_name: str = "train"  # run in wandb, MLflow
    n_gpus_per_node: PositiveInt = 1  # ranks on this machine, CPU or GPU
    nnodes: PositiveInt = 1  # machines; above 1 under torchrun
    timeout_s: PositiveFloat = 600.0  # limit of a collective operation
    trace_step: PositiveInt | None = None  # step that every rank records with torch.profiler

    def steps(self, per_epoch: int) -> int:
        """Return the number of steps of the run."""
        return self.total_training_steps or self.total_epochs * per_epoch


class JobConfig(ABC):
    """What every kind of job has in common."""

    model: TrainedModelConfig
    data: DatasetConfig
    trainer: RunConfig
    seed: int

    kind: ClassVar[str]  # of a job, of `loading.JOBS`
    policy_group: ClassVar[str]  # name of the group with the keys of PolicyConfig

    @property
    def policy(self) -> PolicyConfig:
        group: PolicyConfig = getattr(self, self.policy_group)
        return group

    @property
    def sharding(self) -> ShardingConfig:
        return self.policy.fsdp_config

    @property
    @abstractmethod
    def sequence_parallel_size(self) -> int: ...

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """The longest sequence, in tokens."""

    @property
    def deterministic(self) -> bool:
        """Whether gradients are summed in a fixed order, at some cost."""
        return False

    @property
    def ranks_per_node(self) -> int:
        """Ranks on one machine."""
        return self.trainer.n_gpus_per_node

    @property
    def world_size(self) -> int:
        """Ranks that train."""
        return self.trainer.n_gpus_per_node * self.trainer.nnodes

    @property
    def data_parallel_size(self) -> int:
        """The number of micro-batches at once; ranks of one Ulysses group share one."""
        return self.world_size // self.sequence_parallel_size

    def num_shards(self, ranks: int | None = None) -> int:
        """Return how many of `ranks` ranks, by default the policy's, hold one copy of a model."""
        ranks, size = ranks or self.world_size, self.sharding.fsdp_size
        return ranks if size == -1 else min(size, ranks)


@dataclass(frozen=True)
class SFTFsdpConfig(ShardingConfig):
    offload_policy: StrictBool = False  # weights, gradients, optimizer in host memory


@dataclass(frozen=True)
class SFTModelConfig(PolicyConfig, TrainedModelConfig):
    fsdp_config: SFTFsdpConfig = SFTFsdpConfig()


@dataclass(frozen=True)
class SFTDataConfig(DatasetConfig):
    messages_key: str | None = None  # column of chats; null: prompt_key and response_key
    prompt_key: str = "prompt"  # column of a text or a chat
    prompt_dict_keys: Texts | None = None  # names that lead to the prompt inside its column
    response_key: str = "response"  # column of the text that is trained on
    response_dict_keys: Texts | None = None  # names that lead to the response inside its column
    max_length: PositiveInt = 1024  # of a conversation, in tokens
    train_batch_size: PositiveInt = 256  # conversations per optimizer step, over all ranks
    micro_batch_size_per_gpu: PositiveInt | None = None  # null: by max_token_len_per_gpu
    max_token_len_per_gpu: PositiveInt = 8192  # tokens in one micro-batch


@dataclass(frozen=True)
class SFTOptimConfig(OptimConfig):
    lr: PositiveFloat = 1e-5  # learning rate
    clip_grad: PositiveFloat = 1.0  # maximum global gradient norm


@dataclass(frozen=True)
class SFTTrainerConfig(RunConfig):
    default_local_dir: PathText = "runs/sft"  # the run's folder
    experiment_name: str = "sft"  # run in wandb, MLflow


@dataclass(frozen=True)
class SFTConfig(JobConfig):
    model: SFTModelConfig = SFTModelConfig()
    data: SFTDataConfig = SFTDataConfig()
    optim: SFTOptimConfig = field(default_factory=SFTOptimConfig)
    trainer: SFTTrainerConfig = SFTTrainerConfig()
    ulysses_sequence_parallel_size: PositiveInt = 1  # ranks that share a micro-batch
    seed: Seed = 1  # of data order, dropout and initial adapters

    kind, policy_group = "sft", "model"

    @property
    def sequence_parallel_size(self) -> int:
        return self.ulysses_sequence_parallel_size

    @property
    def max_model_len(self) -> int:
        return self.data.max_length
