"""Gated DeltaNet and gated attention for `rollout.exact`: the same functions in trainer and engine.

A token's bits depend on its own past alone. Convolution and recurrence are so by construction,
whether a sequence is computed at once, in chunks or token by token from the engine's states. Gates
are `delta_gates` and `gated_activation`s, as torch computes the last elements of a thread's part by
another function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybridengine.hybrid.functions import packed_row, packed_segments, rebound
from hybridengine.kernels import causal_conv1d, gated_activation, linear_recurrence, rms_norm
from hybridengine.kernels.delta_net import (
    causal_conv1d_update,
    delta_gates,
    linear_recurrence_update,
)
from hybridengine.run.errors import ModelError

__all__ = ["exact_forwards"]


def exact_forwards(model: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """Return the forwards with exact operators of modules of `model`, transformers' or vLLM's.

    They call the linear layers, norms and attention in these modules.

    Raises:
        ModelError: a module of such a layer has another formula.
    """
    forwards = dict[nn.Module, Callable[..., Any]]()
    module: Any
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in _LAYERS:
            _check(module)
            forwards[module] = _LAYERS[kind.__name__]
            forwards[module.norm] = _gated_norm
            for name in ("conv1d", "chunk_gated_delta_rule"):  # not called
                if (inner := getattr(module, name, None)) is not None:
                    forwards[inner] = type(inner).forward
        elif kind.__name__ in ("Qwen3_5Attention", "Qwen3_5MoeAttention"):
            forwards[module] = rebound(kind.forward, {"torch": _Torch()})
        elif kind.__name__ == "Qwen3NextAttention":
            forwards[module] = _engine_attention
    return forwards


def _check(layer: Any) -> None:
    faults = {
        f"activation {layer.activation}": layer.activation != "silu",
        "the layout of Qwen3-Next": getattr(layer, "gqa_interleaved_layout", False),
    }
    if hasattr(layer, "get_state_dtype"):  # of vLLM
        dtype = layer.get_state_dtype()[1]
        faults[f"states in {dtype} (mamba_ssm_cache_dtype)"] = dtype != torch.float32
        faults["speculative decoding"] = layer.num_spec > 0
    if found := [fault for fault, is_found in faults.items() if is_found]:
        raise ModelError(
            f"its {type(layer).__name__} has {found[0]}, for which there is no exact operator"
        )


class _Torch:
    """torch, in which x * sigmoid(gate) is one operator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    class sigmoid:
        def __init__(self, gate: Tensor) -> None:
            self._gate = gate

        def __rmul__(self, x: Tensor) -> Tensor:
            return gated_activation(self._gate, x, "sigmoid")


def _engine_attention(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
    sizes = [2 * self.q_size, self.kv_size, self.kv_size]
    q, k, v = self.qkv_proj(hidden_states)[0].split(sizes, 1)
    q, gate = q.unflatten(1, (self.num_heads, -1)).chunk(2, 2)
    q, k = self.q_norm(q), self.k_norm(k.unflatten(1, (self.num_kv_heads, -1)))
    q, k = self.rotary_emb(positions, q.flatten(1), k.flatten(1))
    out = gated_activation(gate, self.attn(q, k, v).view(gate.shape), "sigmoid")
    output: Tensor = self.o_proj(out.flatten(1))[0]
    return output


def _gated_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
    return gated_activation(gate, rms_norm(x, self.weight, eps, round_first=True))


def _operands(
    layer: Any, qkv: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the operands of a layer's recurrence.

    qkv: [T, C], after the convolution. a, b: [T, H_v], which become decay and beta.
    """
    values = a.shape[1] * layer.head_v_dim
    keys = (qkv.shape[1] - values) // 2
    sizes = (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    parts = zip(qkv.split([keys, keys, values], 1), sizes, strict=True)
    q, k, v = (part.unflatten(1, (-1, size)) for part, size in parts)
    decay, beta = delta_gates(a, b, layer.A_log, layer.dt_bias.to(a.dtype))
    return q, k, v, decay, beta


def _trained_layer(self: Any, hidden_states: Tensor, cache_params: Any = None, **_: Any) -> Tensor:
    """hidden_states: [1, T, H], packed."""
    segments = packed_segments(cache_params)
    if segments is None:
        raise ModelError("exact operators of linear attention take packed sequences")
    x = packed_row(hidden_states)
    qkv, z, b, a = (
        project(x) for project in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
    )
    weight = self.conv1d.weight.squeeze(1)
    qkv = causal_conv1d(qkv, weight, activation="silu", **segments)
    out = linear_recurrence(*_operands(self, qkv, a, b), l2_norm=True, **segments)[0]
    return self.out_proj(self.norm(out, z.view(out.shape)).flatten(1))[None]


def _engine_layer(self: Any, hidden_states: Tensor) -> Tensor:
    """hidden_states: [T, H], of the sequences of vLLM's step."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
    qkv, z = qkvz.split([x // self.tp_size for x in (self.conv_dim, self.value_dim)], 1)
    z = z.unflatten(1, (-1, self.head_v_dim))
    metadata: Any = get_forward_context().attn_metadata
    if metadata is None:  # vLLM warms up
        return self._output_projection(torch.zeros_like(z), z)
    batch = metadata[self.prefix]
    tokens = batch.num_actual_tokens
    is_decoding = batch.num_decodes == tokens and not is_conv_state_dim_first()
    step = _decode if is_decoding else _continue
    out = step(self, batch, qkv[:tokens], *reversed(ba[:tokens].chunk(2, 1)))
    if tokens < len(z):
        out = torch.cat([out, out.new_zeros(len(z) - tokens, *out.shape[1:])])
    return self._output_projection(out, z)


def _cache(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the last rows [N, W - 1, C] and the states [N, H_v, D_k, D_v] of sequences."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    rows, states = layer.kv_cache
    if is_conv_state_dim_first():
        rows = rows.transpose(1, 2)
    return rows, states.view(*states.shape[:2], layer.head_k_dim, layer.head_v_dim)


def _convolution_weight(layer: Any) -> Tensor:
    """Return the weight [C, W], as it was before vLLM packed it."""
    conv1d = getattr(layer.conv1d, "base_layer", layer.conv1d)  # in a slot for adapters
    weight: Tensor = getattr(conv1d, "_cpu_unpacked_conv_weight", conv1d.weight)
    return weight.view(len(weight), -1)


def _decode(layer: Any, batch: Any, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Continue each sequence by a token, in the engine's cache. No other kernels run (`Graph`)."""
    slots = batch.non_spec_state_indices_tensor[: len(qkv)].contiguous()
    rows, states = _cache(layer)
    x = causal_conv1d_update(qkv, _convolution_weight(layer), rows, slots)
    return linear_recurrence_update(*_operands(layer, x, a, b), states, slots)


def _continue(layer: Any, batch: Any, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Continue the sequences of a batch from the states in the engine's cache, and update them."""
    count = batch.num_decodes + batch.num_prefills
    slots = batch.non_spec_state_indices_tensor[:count].long()
    segments: dict[str, Any] = {"cu_seqlens": batch.non_spec_query_start_loc[: count + 1]}
    row_cache, state_cache = _cache(layer)
    rows, states = row_cache[slots], state_cache[slots]
    if batch.has_initial_state is not None:
        begins = ~batch.has_initial_state[:count]
        rows[begins], states[begins] = 0, 0
    weight = _convolution_weight(layer)
    x = causal_conv1d(qkv, weight, **segments, initial_state=rows, activation="silu")
    row_cache[slots] = _last_rows(qkv, segments["cu_seqlens"], rows)
    options = segments | {"initial_state": states, "output_final_state": True, "l2_norm": True}
    out, final = linear_recurrence(*_operands(layer, x, a, b), **options)
    assert final is not None
    state_cache[slots] = final
    return out


def _last_rows(x: Tensor, starts: Tensor, before: Tensor) -> Tensor:
    """Return the last rows of each segment of x [T, C] after `before`, as many: [S, W - 1, C]."""
    count = before.shape[1]
    place = torch.arange(count) - count  # from the end
    at = starts[1:, None].long() + place
    of_earlier = (starts.diff()[:, None] + place + count).clamp(max=count - 1).long()
    earlier = before.gather(1, of_earlier[..., None].expand_as(before))
    inside = at >= starts[:-1, None]
    return torch.where(inside[..., None], x[at.clamp(min=0)], earlier)


_LAYERS: dict[str, Callable[..., Any]] = {
    "Qwen3_5GatedDeltaNet": _trained_layer,
    "Qwen3_5MoeGatedDeltaNet": _trained_layer,
    "QwenGatedDeltaNetAttention": _engine_layer,
}
