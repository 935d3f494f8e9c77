"""Every key of an SFT run, its type, its limits and its default."""

from __future__ import annotations

from dataclasses import dataclass

from hybridengine.config.schema import (
    Count,
    Discount,
    Flag,
    JobConfig,
    Natural,
    OptimConfig,
    Positive,
    RunConfig,
    ShardingConfig,
    Texts,
    TrainedModelConfig,
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
    train_files: Texts = ()
    val_files: Texts | None = None  # null: no validation at all
    messages_key: str | None = None  # column of whole chats; null: prompt_key and response_key
    prompt_key: str = "prompt"  # text, or a chat
    response_key: str = "response"
    max_length: Count = 1024  # tokens of a conversation
    truncation: Truncation = "error"
    train_batch_size: Count = 256  # conversations per optimizer step, all ranks
    micro_batch_size_per_gpu: Count | None = None  # null: by tokens
    max_token_len_per_gpu: Count = 8192  # in one micro-batch
    shuffle: Flag = True
    chat_template: str | None = None  # Jinja text or a file; null: the tokenizer's own


@dataclass(frozen=True)
class SFTOptimConfig(OptimConfig):
    lr_warmup_steps_ratio: Discount = 0.0  # of all steps
    clip_grad: Positive = 1.0


@dataclass(frozen=True)
class SFTTrainerConfig(RunConfig):
    default_local_dir: str = "runs/sft"
    experiment_name: str = "sft"


@dataclass(frozen=True)
class SFTConfig(JobConfig):
    model: SFTModelConfig = SFTModelConfig()
    data: SFTDataConfig = SFTDataConfig()
    optim: SFTOptimConfig = SFTOptimConfig(lr=1e-5)
    trainer: SFTTrainerConfig = SFTTrainerConfig()
    ulysses_sequence_parallel_size: Count = 1  # ranks that share a micro-batch
    seed: Natural = 1

    @property
    def sharding(self) -> ShardingConfig:
        return self.model.fsdp_config

    @property
    def sequence_parallel_size(self) -> int:
        return self.ulysses_sequence_parallel_size

    def warmup_steps(self, total_steps: int) -> int:
        """In optimizer steps: `lr_warmup_steps`, else the ratio's share of all."""
        return self.optim.lr_warmup_steps or round(self.optim.lr_warmup_steps_ratio * total_steps)
