"""What a step takes: FLOPs and memory, expected and measured, under verl's names."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import psutil
import torch
from transformers import PretrainedConfig

from hybridengine.model import SavedWork
from hybridengine.model.parameters import layout_of
from hybridengine.model.validation import takes_images
from hybridengine.run.config import JobConfig, RLConfig
from hybridengine.train.algorithms import uses_critic

# Dense bfloat16 TFLOP/s of the data sheets; the first entry that the device name contains applies.
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.5,
    "H100 PCIe": 756.5,
    "H100 NVL": 835.5,
    "H100": 989.5,
    "H800": 989.5,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L20": 119.5,
    "A10": 125.0,
    "MI300X": 1307.0,
}

_NOTHING = SavedWork()

GIB = 2.0**30


def performance_metrics(
    num_tokens: int, seconds: float, world_size: int, device: torch.device
) -> dict[str, float]:
    """Return the metrics of a step in which all ranks together processed `num_tokens` tokens."""
    metrics = {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / seconds / world_size,
        "perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 2**30,
    }
    if device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return metrics


class FlopCounter:
    """Model FLOPs of training `model`, and their share of the peak of all devices (MFU).

    Matrix products only (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), with three
    deviations: attention counts the keys that a token attends to, frozen weights have no gradient,
    and what shared prefixes save does not count. Recomputation by gradient checkpointing does not
    count. In a mixture of experts only the experts of a token count; of a model with a vision tower
    only the language model. The peak is the data sheet's; for a CPU or an unknown GPU, the measured
    rate of a matrix product.
    """

    def __init__(self, model: Any, device: torch.device, world_size: int) -> None:
        config = model.config.get_text_config()
        embedding = None if config.tie_word_embeddings else model.get_input_embeddings().weight
        parts = [model]
        if takes_images(model.config):
            parts = [model.get_decoder(), model.get_output_embeddings()]
        language = {id(p) for part in parts for p in part.parameters()}
        self._per_token = 0.0
        for name, p in model.named_parameters():
            if p.ndim >= 2 and p is not embedding and id(p) in language:
                share = _share_per_token(name, config)
                self._per_token += share * p.numel() * (6 if p.requires_grad else 4)
        self._per_pair = 3.0 * _forward_flops_per_pair(config)
        self._peak = world_size * _peak_flops(device)

    def training_flops(self, lengths: Sequence[int], saved: SavedWork = _NOTHING) -> float:
        """Return the FLOPs of a forward and a backward over sequences of these lengths."""
        pairs = sum(length * (length + 1) // 2 for length in lengths) - saved.pairs
        return self._per_token * (sum(lengths) - saved.tokens) + self._per_pair * pairs

    def utilisation(
        self, lengths: Sequence[int], seconds: float, saved: SavedWork = _NOTHING
    ) -> float:
        """Return the MFU of a forward and a backward that took `seconds`."""
        return self.training_flops(lengths, saved) / seconds / self._peak


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
        heads, layers = text.num_attention_heads, text.num_hidden_layers
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        attention_width = heads * head_dim
        kv_width = (getattr(text, "num_key_value_heads", None) or heads) * head_dim
        if getattr(text, "kv_lora_rank", None):  # multi-head latent attention
            attention_width = kv_width = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim)
        experts_per_token, ffn_width = getattr(text, "num_experts_per_tok", None) or 0, 0
        for name, shape in shapes.items():
            if name.endswith(("down_proj", "down_proj.weight")):
                ffn_width += shape[-1] * (experts_per_token if len(shape) == 3 else 1)
        ffn_width = ffn_width // layers or text.intermediate_size
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
        2.0 * _share_per_token(name, config) * math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) >= 2 and shape[0] != config.vocab_size
    )
    return per_token, _forward_flops_per_pair(config)


def _share_per_token(name: str, config: PretrainedConfig) -> float:
    """Return the share of a weight matrix that a token is multiplied with."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 0)
    active = getattr(config, "num_experts_per_tok", None) or 1
    return active / experts if experts and ".experts." in name else 1.0


def _forward_flops_per_pair(config: PretrainedConfig) -> float:
    """Return the FLOPs of one token and one key in all layers: the score and the weighted sum."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention (DeepSeek-V2, Kimi-K2)
        key_dim, value_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    else:
        key_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        value_dim = key_dim
    return 2.0 * config.num_hidden_layers * heads * (key_dim + value_dim)


@cache
def _peak_flops(device: torch.device) -> float:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, tflops in _PEAK_TFLOPS.items():
            if known in name:
                return tflops * 1e12
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.ones(1024, 1024, device=device, dtype=dtype)
    fastest = float("inf")
    for _ in range(3):  # the first one warms up
        started = time.perf_counter()
        float((a @ a)[0, 0])
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * 1024**3 / fastest


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
