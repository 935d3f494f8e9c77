"""`paged_attention` as a backend of vLLM's attention, with the bits of the trainer's.

`hybridengine.engine.exact.operators` puts it in. The key-value cache has a layout of its own in
vLLM's memory; vLLM moves it in blocks only, so prefix caching, chunked prefill and preemption work
as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from hybridengine.kernels import paged_attention, write_kv_cache
from hybridengine.run.errors import UserError

_UNIT = 16  # of head sizes, and of the tokens of a block
_MAX_GPU_HEAD = 256  # as in the trainer's attention


@dataclass
class ExactMetadata(AttentionMetadata):
    """What `paged_attention` reads of a batch."""

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    # (rows, slots) of tokens that other sequences have in common with these, and their slots
    repeats: tuple[Tensor, Tensor] | None = None


class ExactAttention(AttentionImpl[ExactMetadata]):
    """Decoder self-attention of a causal model; anything else is refused as the engine is built."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        config = get_current_vllm_config()
        dtype = config.model_config.dtype
        name = str(dtype).removeprefix("torch.")
        _refuse_any(
            (attn_type != AttentionType.DECODER, f"{attn_type} attention"),
            (config.model_config.is_mm_prefix_lm, "bidirectional attention among image tokens"),
            (alibi_slopes is not None, "ALiBi"),
            (dtype not in (torch.float32, torch.bfloat16), f"dtype {name}"),
            (kv_cache_dtype not in ("auto", name), f"a key-value cache of {kv_cache_dtype}"),
            (head_size % _UNIT != 0, f"head size {head_size}, no multiple of {_UNIT}"),
            (
                current_platform.is_cuda() and head_size > _MAX_GPU_HEAD,
                f"head size {head_size}, above {_MAX_GPU_HEAD}",
            ),
            (config.kv_transfer_config is not None, "the transfer of key-value caches"),
        )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self.sinks = sinks  # the model's parameter, which a sync writes
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: ExactMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of `query` [T, H, D] to `output`, from the cache alone."""
        if attn_metadata is None:  # vLLM warms up
            return output
        if attn_metadata.repeats is not None and self.kv_sharing_target_layer_name is None:
            rows, slots = attn_metadata.repeats
            write_kv_cache(key[rows], value[rows], kv_cache, slots)
        tokens = attn_metadata.num_actual_tokens
        paged_attention(
            query[:tokens],
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            sinks=self.sinks,
            softmax_scale=self.scale,
            window_size=self.sliding_window,
            softcap=self.logits_soft_cap or None,
            out=output[:tokens].view(tokens, self.num_heads, self.head_size),
        )
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write new keys and values; `slot_mapping` may be of fewer tokens than these."""
        tokens = slot_mapping.shape[0]
        write_kv_cache(key[:tokens], value[:tokens], kv_cache, slot_mapping)


class ExactMetadataBuilder(AttentionMetadataBuilder[ExactMetadata]):
    """The part of vLLM's metadata that is needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ExactMetadata:
        batch = common_attn_metadata
        _refuse_any((batch.causal is not True, "attention that is not causal"))
        return ExactMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            query_start_loc=batch.query_start_loc[: batch.num_reqs + 1],
            seq_lens=batch.seq_lens[: batch.num_reqs],
            block_table=batch.block_table_tensor[: batch.num_reqs],
            slot_mapping=batch.slot_mapping,
        )


class ExactAttentionBackend(AttentionBackend):
    """The backend, in place of `CPU_ATTN` on a CPU and as `CUSTOM` on a GPU."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(_UNIT)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A layer's cache is contiguous as [num_blocks, H_kv, block_size, D + D_v]."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[ExactAttention]:
        return ExactAttention

    @staticmethod
    def get_builder_cls() -> type[ExactMetadataBuilder]:
        return ExactMetadataBuilder


def _refuse_any(*cases: tuple[bool, str]) -> None:
    """Raise UserError for the first (condition, feature) whose condition is true."""
    for condition, feature in cases:
        if condition:
            _refuse(feature)


def _refuse(feature: str) -> NoReturn:
    raise UserError(
        f"the engine cannot have the trainer's attention: the model or the engine uses {feature}, "
        "which is not supported; supported is causal self-attention in float32 or bfloat16"
    )
