"""What a step is expected to take: FLOPs and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import PretrainedConfig

from hybridengine.model.parameters import layout_of
from hybridengine.run.config import JobConfig, RLConfig
from hybridengine.train.algorithms import uses_critic

GIB = 2.0**30
_WITHOUT_ATTENTION = {"linear_attention", "conv", "mamba", "moe", "mlp"}  # in `layer_types`


def pair_cost(config: PretrainedConfig, shapes: Mapping[str, Sequence[int]]) -> float:
    """Return the FLOPs of a key that a token attends to, relative to the token's other FLOPs.

    Without the head, whose rows do not depend on how sequences are packed. shapes: of the
    parameters, by name.
    """
    per_token, per_pair = forward_flops(config, shapes)
    return per_pair / per_token


@dataclass(frozen=True)
class LayerShape:
    """Widths of a decoder layer, for the elements that it saves and moves.

    attention_width: width of the query of a token.
    kv_width: width of the key, and of the value, of a token.
    ffn_width: inner width of the feed-forward, summed over the experts of a token.
    """

    hidden_size: int
    num_layers: int
    attention_width: int
    kv_width: int
    ffn_width: int

    @classmethod
    def of(cls, config: PretrainedConfig, shapes: Mapping[str, Sequence[int]]) -> Self:
        """Build from the configuration and the shapes of the trained parameters, by name."""
        text: Any = config.get_text_config()
        heads = getattr(text, "num_attention_heads", None) or text.num_heads  # of Mamba alone
        layers = text.num_hidden_layers
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        attention_width = heads * head_dim
        kv_width = (getattr(text, "num_key_value_heads", None) or heads) * head_dim
        if getattr(text, "kv_lora_rank", None):  # multi-head latent attention
            attention_width = kv_width = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim)
        experts_per_token, ffn_width = getattr(text, "num_experts_per_tok", None) or 0, 0
        for name, shape in shapes.items():
            if name.endswith(("down_proj", "down_proj.weight")):
                ffn_width += shape[-1] * (experts_per_token if len(shape) == 3 else 1)
        ffn_width = ffn_width // layers or getattr(text, "intermediate_size", 0)
        return cls(text.hidden_size, layers, attention_width, kv_width, ffn_width)

    @property
    def saved_elements(self) -> int:
        """Elements that a layer's forward saves for its backward, of a token.

        Counted from the operators of a Hugging Face decoder layer: two norms (float32 copy and
        normalised, 3 H each) and what the products behind them read (H each); query and output of
        the attention (2 A), key and value (2 K); gate, its activation, up, and their product (4 F).
        """
        return 8 * self.hidden_size + 2 * (
            self.attention_width + self.kv_width + 2 * self.ffn_width
        )


def forward_flops(
    config: PretrainedConfig, shapes: Mapping[str, Sequence[int]]
) -> tuple[float, float]:
    """Return the FLOPs of a forward in all layers: (of a token, of a key that it attends to).

    Without the head. shapes: of the parameters, by name.
    """
    config = config.get_text_config()
    per_token = sum(
        2.0 * share_per_token(name, config) * math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) >= 2 and shape[0] != config.vocab_size
    )
    return per_token, forward_flops_per_pair(config)


def share_per_token(name: str, config: PretrainedConfig) -> float:
    """Return the share of a weight matrix that a token is multiplied with."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 0)
    active = getattr(config, "num_experts_per_tok", None) or 1
    return active / experts if experts and ".experts." in name else 1.0


def forward_flops_per_pair(config: PretrainedConfig) -> float:
    """Return the FLOPs of one token and one key in all layers: the score and the weighted sum."""
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    layers = sum(kind not in _WITHOUT_ATTENTION for kind in kinds)
    if not layers:
        return 0.0
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention (DeepSeek-V2, Kimi-K2)
        key_dim, value_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    else:
        key_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        value_dim = key_dim
    return 2.0 * layers * heads * (key_dim + value_dim)


def num_parameters(config: JobConfig, path: str | None = None) -> int:
    """Return the parameters of the model at `path`, by default model.path."""
    return sum(map(math.prod, layout_of(config.model.at(path)).parameters.values()))


def memory_gib(
    config: RLConfig, model: PretrainedConfig, engine: str, *, shares_base: bool, has_gpu: bool
) -> dict[str, float]:
    """Estimate the peak memory per rank of each part of the run.

    A trained weight takes 16 bytes: float32 master, gradient and two moments. Where layers are
    recomputed, the input of every layer is kept, and the activations of one.
    shares_base: the base of LoRA is the engine's weights.
    """
    shapes = layout_of(config.model).parameters
    shape, numel = LayerShape.of(model, shapes), sum(map(math.prod, shapes.values()))
    shards, per_token = config.num_shards(), shape.saved_elements * shape.num_layers
    if config.model.enable_gradient_checkpointing:
        per_token = shape.hidden_size * shape.num_layers + shape.saved_elements
    tokens = max(
        config.actor.ppo_max_token_len_per_gpu,
        -(-config.max_sequence_length // config.sequence_parallel_size),
    )
    lora = config.model.lora_rank > 0  # frozen weights have neither gradients nor moments
    parts = {"policy": (4.0 if lora else 16.0) * numel * (not shares_base) / shards}
    if config.uses_reference and not lora:
        parts["reference"] = 4.0 * numel / shards
    if path := config.algorithm.distill.teacher_path:
        parts["teacher"] = 4.0 * num_parameters(config, path) / shards
    if uses_critic(config) and not config.num_critic_ranks:
        parts["critic"] = 16.0 * numel / shards
    parts["activations"] = per_token * getattr(torch, config.sharding.dtype).itemsize * tokens
    if not config.rollout.servers:
        weights = getattr(torch, config.rollout.dtype).itemsize * numel
        parts["engine weights"] = weights / config.rollout.tensor_model_parallel_size
    gib = {name: size / GIB for name, size in parts.items()}
    if engine == "vllm" and not config.rollout.servers and not has_gpu:
        gib["cache"] = config.rollout.kv_cache_gib
    return gib
