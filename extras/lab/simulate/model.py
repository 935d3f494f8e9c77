"""A model as numbers: parameters, FLOPs and bytes of a token, read from config.json alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from transformers import PretrainedConfig

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
        )

    def allows_tp(self, size: int) -> bool:
        """Return whether the engine can be tensor parallel over `size` ranks."""
        kv = self.kv_heads
        return self.heads % size == 0 and max(kv, size) % min(kv, size) == 0

    def kv_bytes(self, tp_size: int, itemsize: int) -> float:
        """Bytes of a cached token on a rank: key-value heads are divided, then replicated."""
        return itemsize * self.kv_elements / min(tp_size, self.kv_heads)
