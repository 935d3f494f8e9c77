"""Every key of an SFT run; rules as in `hybridengine.config.schema`."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridengine.config.schema import (
    JobConfig,
    OptimConfig,
    RunConfig,
    ShardingConfig,
    TrainedModelConfig,
)
from hybridengine.config.types import (
    Count,
    Flag,
    Options,
    PathText,
    PathTexts,
    Positive,
    Seed,
    Truncation,
)

__all__ = ["SFTConfig", "SFTDataConfig"]


@dataclass(frozen=True)
class SFTFsdpConfig(ShardingConfig):
    offload_policy: Flag = False  # weights, gradients and moments live, and step, in host memory


@dataclass(frozen=True)
class SFTModelConfig(TrainedModelConfig):
    fsdp_config: SFTFsdpConfig = SFTFsdpConfig()


@dataclass(frozen=True)
class SFTDataConfig:
    train_files: PathTexts = ()  # conversations: files, folders or globs
    val_files: PathTexts | None = None  # null: no validation at all
    messages_key: str | None = None  # column of whole chats; null: prompt_key and response_key
    prompt_key: str = "prompt"  # text, or a chat
    response_key: str = "response"  # text that is trained on
    max_length: Count = 1024  # tokens of a conversation
    truncation: Truncation = "error"  # of longer ones: refuse, or cut at the left or right
    train_batch_size: Count = 256  # conversations per optimizer step, all ranks
    micro_batch_size_per_gpu: Count | None = None  # null: by tokens
    max_token_len_per_gpu: Count = 8192  # in one micro-batch
    shuffle: Flag = True  # a new order every epoch, by seed
    chat_template: PathText | None = None  # Jinja text or a file; null: the tokenizer's own
    apply_chat_template_kwargs: Options = field(default_factory=dict)  # for the chat template


@dataclass(frozen=True)
class SFTOptimConfig(OptimConfig):
    lr: Positive = 1e-5  # learning rate of AdamW
    clip_grad: Positive = 1.0  # global gradient norm


@dataclass(frozen=True)
class SFTTrainerConfig(RunConfig):
    default_local_dir: PathText = "runs/sft"  # the run's folder
    experiment_name: str = "sft"  # in wandb


@dataclass(frozen=True)
class SFTConfig(JobConfig):
    model: SFTModelConfig = SFTModelConfig()
    data: SFTDataConfig = SFTDataConfig()
    optim: SFTOptimConfig = SFTOptimConfig()
    trainer: SFTTrainerConfig = SFTTrainerConfig()
    ulysses_sequence_parallel_size: Count = 1  # ranks that share a micro-batch
    seed: Seed = 1  # of data order, dropout and initial adapters

    @property
    def sharding(self) -> ShardingConfig:
        return self.model.fsdp_config

    @property
    def sequence_parallel_size(self) -> int:
        return self.ulysses_sequence_parallel_size
