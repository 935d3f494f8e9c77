"""Every key of an SFT run, and verl's names for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridengine.config.loading import ConfigError, Rules, load_config
from hybridengine.config.schema import (
    OptimConfig,
    RunConfig,
    ShardingConfig,
    TrainedModelConfig,
    _setting,
)

__all__ = ["SFT_ALIASES", "SFTConfig", "SFTDataConfig", "load_sft_config"]


@dataclass(frozen=True)
class SFTFsdpConfig(ShardingConfig):
    offload_policy: bool = False  # weights, gradients and moments live, and step, in host memory


@dataclass(frozen=True)
class SFTModelConfig(TrainedModelConfig):
    fsdp_config: SFTFsdpConfig = field(default_factory=SFTFsdpConfig)


@dataclass(frozen=True)
class SFTDataConfig:
    train_files: str | tuple[str, ...] = ""
    val_files: str | tuple[str, ...] | None = None  # null: no validation at all
    messages_key: str | None = None  # column of whole chats; null: prompt_key and response_key
    prompt_key: str = "prompt"  # text, or a chat
    response_key: str = "response"
    max_length: int = _setting(1024, at_least=2)  # tokens of a conversation
    truncation: str = _setting("error", choices=("error", "left", "right"))
    train_batch_size: int = _setting(256, at_least=1)  # conversations per optimizer step, all ranks
    micro_batch_size_per_gpu: int | None = _setting(None, at_least=1)  # null: by tokens
    max_token_len_per_gpu: int = _setting(8192, at_least=1)  # in one micro-batch
    shuffle: bool = True
    chat_template: str | None = None  # Jinja text or a file; null: the tokenizer's own


@dataclass(frozen=True)
class SFTOptimConfig(OptimConfig):
    lr: float = _setting(1e-5, above=0)
    lr_warmup_steps_ratio: float = _setting(0.0, at_least=0, at_most=1)  # of all steps
    clip_grad: float = _setting(1.0, above=0)


@dataclass(frozen=True)
class SFTTrainerConfig(RunConfig):
    default_local_dir: str = "runs/sft"
    experiment_name: str = "sft"


@dataclass(frozen=True)
class SFTConfig:
    model: SFTModelConfig = field(default_factory=SFTModelConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    optim: SFTOptimConfig = field(default_factory=SFTOptimConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    ulysses_sequence_parallel_size: int = _setting(1, at_least=1)  # ranks that share a micro-batch
    seed: int = _setting(1, at_least=0)

    @property
    def world_size(self) -> int:
        return self.trainer.n_gpus_per_node * self.trainer.nnodes

    @property
    def data_parallel_size(self) -> int:
        """How many different micro-batches run at once; the ranks of one share its sequences."""
        return self.world_size // self.ulysses_sequence_parallel_size

    def warmup_steps(self, total_steps: int) -> int:
        """In optimizer steps: `lr_warmup_steps`, else the ratio's share of all."""
        optim = self.optim
        return optim.lr_warmup_steps or round(optim.lr_warmup_steps_ratio * total_steps)


# verl's path → ours, of its old trainer (partial_pretrain, …) and its new one (engine, …).
SFT_ALIASES = {
    "model.partial_pretrain": "model.path",
    "engine": "model.fsdp_config",
    "model.fsdp_config.cpu_offload": "model.fsdp_config.offload_policy",
    "engine.ulysses_sequence_parallel_size": "ulysses_sequence_parallel_size",
    "data.multiturn.messages_key": "data.messages_key",
    "data.micro_batch_size": "data.micro_batch_size_per_gpu",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.seed": "seed",
    "data.seed": "seed",
}

_REPLACED = {
    "use_remove_padding": "sequences are always packed; remove this key",
    "data.use_dynamic_bsz": "set data.micro_batch_size_per_gpu, or leave it null to fill by tokens",
    "data.balance_dp_token": "ranks are always balanced; remove this key",
    "data.pad_mode": "sequences are always packed; remove this key",
    "data.multiturn.enable": "set data.messages_key for whole chats; remove this key",
    "model.use_liger": "fused kernels are always used; remove this key",
    "model.fsdp_config.offload_params": "set model.fsdp_config.offload_policy",
    "model.fsdp_config.param_offload": "set model.fsdp_config.offload_policy",
    "checkpoint.save_contents": "a checkpoint is always whole; trainer.save_hf_model adds the "
    "Hugging Face folder",
}


def load_sft_config(path: str | Path | None, overrides: Sequence[str] = ()) -> SFTConfig:
    """As `load_config`, for `hybridengine sft`."""
    config: SFTConfig = load_config(path, overrides, _RULES)
    return config


def _check_together(config: SFTConfig) -> None:
    data, world, shared = config.data, config.world_size, config.ulysses_sequence_parallel_size
    if world % shared:
        raise ConfigError(
            f"ulysses_sequence_parallel_size is {shared}, which does not divide the {world} ranks "
            "(trainer.n_gpus_per_node * trainer.nnodes)"
        )
    if data.micro_batch_size_per_gpu is None and data.max_token_len_per_gpu < data.max_length:
        raise ConfigError(
            f"data.max_token_len_per_gpu is {data.max_token_len_per_gpu}, less than one longest "
            f"conversation of data.max_length {data.max_length}; raise it"
        )
    if config.optim.lr_warmup_steps and config.optim.lr_warmup_steps_ratio:
        raise ConfigError("optim.lr_warmup_steps and optim.lr_warmup_steps_ratio: give one of them")


_RULES = Rules(
    SFTConfig, SFT_ALIASES, _REPLACED, ("model.path", "data.train_files"), _check_together
)
