"""`paged_attention` as a backend of vLLM's attention on a CPU, with the bits of the trainer's.

`hybridengine.rollout.vllm.attention` puts it in. The key-value cache has a layout of its own in
vLLM's memory; vLLM moves it in blocks only, so prefix caching, chunked prefill and preemption work
as before.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from hybridengine.errors import UserError
from hybridengine.kernels import paged_attention, write_kv_cache

__all__ = ["ExactAttention", "ExactAttentionBackend", "RefusedMlaBackend"]

_HEAD_UNIT = 16


class ExactAttention(CPUAttentionBackendImpl):
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
            (sinks is not None, "attention sinks"),
            (dtype not in (torch.float32, torch.bfloat16), f"dtype {name}"),
            (kv_cache_dtype not in ("auto", name), f"a key-value cache of {kv_cache_dtype}"),
            (head_size % _HEAD_UNIT != 0, f"head size {head_size}, no multiple of {_HEAD_UNIT}"),
            (config.kv_transfer_config is not None, "the transfer of key-value caches"),
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of `query` [T, H, D] to `output`, from the cache alone."""
        if attn_metadata is None:  # vLLM warms up
            return output
        tokens = attn_metadata.num_actual_tokens
        paged_attention(
            query[:tokens],
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            softmax_scale=self.scale,
            window_size=self.sliding_window if self.sliding_window > 0 else None,
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


class ExactMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's metadata without the schedule of its own kernel."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        batch = common_attn_metadata
        _refuse_any((batch.causal is not True, "attention that is not causal"))
        return CPUAttentionMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            query_start_loc=batch.query_start_loc,
            max_seq_len=batch.max_seq_len,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            scheduler_metadata=None,
        )


class ExactAttentionBackend(CPUAttentionBackend):
    """The backend in place of `CPU_ATTN`."""

    @staticmethod
    def get_impl_cls() -> type[ExactAttention]:
        return ExactAttention

    @staticmethod
    def get_builder_cls() -> type[ExactMetadataBuilder]:
        return ExactMetadataBuilder


class RefusedMlaBackend(CPUMLABackend):
    """In place of the backends of multi-head latent attention, which vLLM would choose silently."""

    @staticmethod
    def get_impl_cls() -> NoReturn:
        _refuse("multi-head latent attention")


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
