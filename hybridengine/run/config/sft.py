"""Every key of an SFT run; the rules are those of `hybridengine.run.config.common`."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import StrictBool

from hybridengine.run.config.common import (
    DatasetConfig,
    JobConfig,
    OptimConfig,
    PathText,
    PolicyConfig,
    PositiveFloat,
    PositiveInt,
    RunConfig,
    Seed,
    ShardingConfig,
    Texts,
    TrainedModelConfig,
)


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
    lr: PositiveFloat = 1e-5  # learning rate of AdamW
    clip_grad: PositiveFloat = 1.0  # maximum global gradient norm


@dataclass(frozen=True)
class SFTTrainerConfig(RunConfig):
    default_local_dir: PathText = "runs/sft"  # the run's folder
    experiment_name: str = "sft"  # run in wandb, MLflow


@dataclass(frozen=True)
class SFTConfig(JobConfig):
    model: SFTModelConfig = SFTModelConfig()
    data: SFTDataConfig = SFTDataConfig()
    optim: SFTOptimConfig = SFTOptimConfig()
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
