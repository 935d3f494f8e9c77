"""What is simulated, as numbers: a model, the work of a step, and a layout of the ranks.

A model is its parameters, and the FLOPs and bytes of a token, read from config.json alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from transformers import PretrainedConfig

from hybridengine.lab.simulate.config import Mode, WorkloadConfig
from hybridengine.train.performance import LayerShape, forward_flops


@dataclass(frozen=True)
class ModelShape(LayerShape):
    """Sizes of a decoder-only model. FLOPs are those of a forward over all layers.

    num_parameters: all parameters.
    root_parameters: those outside the decoder layers (embedding, head), FSDP's root group.
    expert_parameters: those in experts; a token uses experts_per_token / num_experts of them.
    token_flops: FLOPs of a token, without attention and the head.
    pair_flops: FLOPs of a token for each key that it attends to.
    decode_pair_flops: the same for a cached key.
    head_flops: FLOPs of the head for a token.
    matrices: shapes of the layers' weights, [M, N] or [E, M, N], which Muon updates.
    kv_elements: elements that a token has in the KV cache.
    kv_heads: the most ranks over which the KV cache can be divided.
    heads: number of attention heads.
    """

    num_parameters: int
    root_parameters: int
    expert_parameters: int
    num_experts: int
    experts_per_token: int
    heads: int
    kv_heads: int
    kv_elements: int
    token_flops: float
    pair_flops: float
    decode_pair_flops: float
    head_flops: float
    matrices: tuple[tuple[int, ...], ...]

    @property
    def layer_parameters(self) -> int:
        """Parameters of all decoder layers."""
        return self.num_parameters - self.root_parameters

    def held_parameters(self, expert_parallel: int) -> float:
        """Return the parameters of all decoder layers whose experts are divided over ranks."""
        return self.layer_parameters - self.expert_parameters * (1 - 1 / expert_parallel)

    @property
    def elementwise_elements(self) -> tuple[int, int]:
        """Elements that fused kernels move for a token of a layer outside of products.

        (forward, backward): two norms with their residuals, rotation of query and key, gate.
        """
        rotation = 2 * (self.attention_width + self.kv_width)
        return (
            8 * self.hidden_size + rotation + 3 * self.ffn_width,
            10 * self.hidden_size + rotation + 5 * self.ffn_width,
        )

    def active_parameters(self, tokens: float) -> float:
        """Return the parameters that at least one of `tokens` tokens reads, without the embedding.

        Tokens choose experts independently and uniformly: 1 - (1 - k/E)^tokens of them are read.
        """
        head = self.head_flops / 2
        others = self.layer_parameters - self.expert_parameters
        if not self.num_experts:
            return others + head
        unread = (1 - self.experts_per_token / self.num_experts) ** tokens
        return others + head + self.expert_parameters * (1 - unread)

    @classmethod
    def of(cls, config: PretrainedConfig, shapes: Mapping[str, Sequence[int]]) -> Self:
        """Build from the configuration and the shapes of the trained parameters, by name."""
        text: Any = config.get_text_config()
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        token_flops, pair_flops = forward_flops(config, shapes)
        heads, layers = text.num_attention_heads, text.num_hidden_layers
        num_experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", 0)
        per_token = getattr(text, "num_experts_per_tok", None) or 0
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        layer = LayerShape.of(config, shapes)
        kv_elements = 2 * layer.kv_width * layers
        decode_pair_flops = pair_flops
        if rank := getattr(text, "kv_lora_rank", None):  # the cache holds one latent for all heads
            latent = rank + text.qk_rope_head_dim
            kv_elements, kv_heads = latent * layers, 1
            decode_pair_flops = 2.0 * layers * heads * (latent + rank)
        root = sum(size for name, size in sizes.items() if ".layers." not in name)
        return cls(
            **asdict(layer),
            num_parameters=sum(sizes.values()),
            root_parameters=root,
            expert_parameters=experts,
            num_experts=num_experts or 0,
            experts_per_token=per_token,
            heads=heads,
            kv_heads=kv_heads,
            kv_elements=kv_elements,
            token_flops=token_flops,
            pair_flops=pair_flops,
            decode_pair_flops=decode_pair_flops,
            head_flops=2.0 * text.hidden_size * text.vocab_size,
            matrices=tuple(
                tuple(shape)
                for name, shape in shapes.items()
                if ".layers." in name and len(shape) in (2, 3) and min(shape[-2:]) > 1
            ),
        )

    def allows_tp(self, size: int) -> bool:
        """Return whether the engine can be tensor parallel over `size` ranks."""
        kv = self.kv_heads
        return self.heads % size == 0 and max(kv, size) % min(kv, size) == 0

    def kv_bytes(self, tp_size: int, itemsize: int) -> float:
        """Bytes of a cached token on a rank: key-value heads are divided, then replicated."""
        return itemsize * self.kv_elements / min(tp_size, self.kv_heads)


@dataclass(frozen=True)
class Layout:
    """How ranks train and generate.

    mode: in "sync" all ranks do both, one after the other (colocated); in "one_step_off" the first
      `trainer_ranks` train while the others generate the next batch.
    critic_ranks: how many of the trainer ranks hold only the critic; 0 if actor and critic share
      all trainer ranks.
    The other fields are explained in docs/training.md.
    """

    mode: Mode
    trainer_ranks: int
    engine_ranks: int
    fsdp_size: int
    tp_size: int
    sequence_parallel: int = 1
    critic_ranks: int = 0
    gradient_checkpointing: bool = False
    reshard_after_forward: bool = True
    offload: bool = False
    expert_parallel: int = 1
    share_engine_weights: bool = False

    @property
    def is_split(self) -> bool:
        return self.mode == "one_step_off"

    @property
    def actor_ranks(self) -> int:
        """Ranks that train the policy."""
        return self.trainer_ranks - self.critic_ranks

    @property
    def num_engines(self) -> int:
        return self.engine_ranks // self.tp_size

    @property
    def replicas(self) -> int:
        """Copies of the policy's weights (HSDP)."""
        return self.actor_ranks // self.fsdp_size


@dataclass(frozen=True)
class Workload:
    """The work of a step: a checked configuration, and what follows from it."""

    config: WorkloadConfig

    @property
    def num_responses(self) -> int:
        return self.config.prompts * self.config.n

    @property
    def train_itemsize(self) -> int:
        return getattr(torch, self.config.dtype).itemsize

    @property
    def engine_itemsize(self) -> int:
        return getattr(torch, self.config.engine_dtype).itemsize

    @cached_property
    def lengths(self) -> np.ndarray:
        """Response lengths of the step, int64 [responses], in a fixed random order.

        Quantiles of the observed lengths or, from a mean and a maximum, of the distribution of
        largest entropy with this mean on [1, max]: a truncated exponential.
        """
        config = self.config
        quantiles = (np.arange(self.num_responses) + 0.5) / self.num_responses
        if config.response_lengths:
            ordered = np.sort(np.array(config.response_lengths))
            lengths = ordered[(quantiles * len(ordered)).astype(np.int64)]
        else:
            lengths = truncated_exponential(
                quantiles, config.response_length, config.max_response_length
            )
        return np.random.default_rng(0).permutation(np.rint(lengths).astype(np.int64))

    @cached_property
    def response_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def tokens(self) -> float:
        """Tokens of all sequences of the step, each with its prompt."""
        return self.response_tokens + self.num_responses * self.config.prompt_length

    @cached_property
    def trained_tokens(self) -> float:
        """Tokens that the trainer computes: a shared prompt counts once for its group."""
        prompts = self.config.prompts if self.config.shared_prefix else self.num_responses
        return self.response_tokens + prompts * self.config.prompt_length

    @cached_property
    def trained_pairs(self) -> float:
        """Pairs (token, key that it attends to) that the trainer computes."""
        prompt, lengths = self.config.prompt_length, self.lengths.astype(np.float64)
        prompts = self.config.prompts if self.config.shared_prefix else self.num_responses
        of_responses = (lengths * prompt + lengths * (lengths + 1) / 2).sum()
        return float(of_responses + prompts * prompt * (prompt + 1) / 2)

    @cached_property
    def longest_sequence(self) -> float:
        return self.config.prompt_length + float(self.lengths.max())

    @property
    def optimizer_steps(self) -> int:
        return self.config.mini_batches * self.config.ppo_epochs

    def tokens_per_micro_batch(self, ranks: int, sequence_parallel: int) -> tuple[float, int]:
        """Return (tokens of a micro-batch on a rank, micro-batches of an optimizer step)."""
        replicas = ranks // sequence_parallel
        per_rank = self.trained_tokens / self.config.mini_batches / replicas / sequence_parallel
        limit = max(self.config.max_tokens_per_gpu, self.longest_sequence / sequence_parallel)
        count = max(1, math.ceil(per_rank / limit))
        return per_rank / count, count


def truncated_exponential(quantiles: np.ndarray, mean: float, maximum: float) -> np.ndarray:
    """Return quantiles of the density c exp(r x) on [1, maximum] with this mean."""
    span = maximum - 1.0
    target = (min(max(mean, 1.0), maximum) - 1.0) / span if span else 0.0
    if not span or target <= 0 or target >= 1:
        return np.full_like(quantiles, mean)

    def mean_of(rate: float) -> float:  # on [0, 1]
        return 0.5 + rate / 12 if abs(rate) < 1e-4 else 1 / -np.expm1(-rate) - 1 / rate

    low, high = -500.0, 500.0
    for _ in range(100):
        rate = (low + high) / 2
        low, high = (rate, high) if mean_of(rate) < target else (low, rate)
    if abs(rate) < 1e-4:
        return 1 + span * quantiles
    if rate > 0:  # exp(-rate) instead of exp(rate): no overflow
        x = 1 + np.log(quantiles + (1 - quantiles) * np.exp(-rate)) / rate
    else:
        x = np.log1p(quantiles * np.expm1(rate)) / rate
    return 1 + span * x
