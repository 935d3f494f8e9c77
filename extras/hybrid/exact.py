"""Gated DeltaNet and gated attention for `rollout.exact`: the same functions in trainer and engine.

A token's bits depend on its own past alone. Convolution and recurrence are so by construction,
whether a sequence is computed at once, in chunks or token by token from the engine's states. Gates
are `gated_activation`s, as torch computes the last elements of a thread's part by another function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybridengine.hybrid.functions import packed_row, packed_segments, rebound
from hybridengine.kernels import causal_conv1d, gated_activation, linear_recurrence, rms_norm
from hybridengine.run.errors import ModelError

__all__ = ["exact_forwards"]

_LANES = 64  # elements, of which torch computes all in vectors


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
        elif kind.__name__ in _ATTENTION:
            forwards[module] = rebound(kind.forward, {"torch": _Torch()})
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
    """torch with an exact sigmoid."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def sigmoid(x: Tensor) -> Tensor:
        return gated_activation(x, torch.ones_like(x), "sigmoid")


def _gated_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
    return gated_activation(gate, rms_norm(x, self.weight, eps, round_first=True))


def _mix(
    layer: Any, qkv: Tensor, a: Tensor, b: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Run the recurrence of a layer over tokens that are convolved.

    qkv: [T, C]; a, b: [T, H_v], which become decay and beta. options: of `linear_recurrence`.
    """
    heads = a.shape[1]
    values = heads * layer.head_v_dim
    keys = (qkv.shape[1] - values) // 2
    q, k, v = qkv.split([keys, keys, values], 1)
    q, k = (x.unflatten(1, (-1, layer.head_k_dim)) for x in (q, k))
    # The engine keeps A_log in float32, and the trainer computes with all weights in its dtype.
    log_rate = layer.A_log.to(qkv.dtype).float()
    rate = log_rate[:, None].expand(-1, _LANES).contiguous().exp()[:, 0]
    g = gated_activation(a.float() + layer.dt_bias.float(), (-rate).expand(len(a), -1), "softplus")
    v, beta = v.unflatten(1, (heads, -1)), _Torch.sigmoid(b)
    return linear_recurrence(q, k, v, g, beta, l2_norm=True, **options)


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
    out = _mix(self, qkv, a, b, **segments)[0]
    return self.out_proj(self.norm(out, z.view(out.shape)).flatten(1))[None]


def _engine_layer(self: Any, hidden_states: Tensor) -> Tensor:
    """hidden_states: [T, H], of the sequences of vLLM's step."""
    from vllm.forward_context import get_forward_context

    qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
    qkv, z = qkvz.split([x // self.tp_size for x in (self.conv_dim, self.value_dim)], 1)
    z = z.unflatten(1, (-1, self.head_v_dim))
    out = torch.zeros_like(z)
    metadata: Any = get_forward_context().attn_metadata
    if metadata is not None:  # else vLLM warms up
        batch = metadata[self.prefix]
        tokens = batch.num_actual_tokens
        b, a = ba[:tokens].chunk(2, 1)
        out[:tokens] = _step(self, batch, qkv[:tokens], a, b)
    return self._output_projection(out, z)


def _step(layer: Any, batch: Any, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Continue the sequences of a batch from the states in the engine's cache, and update them."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    count = batch.num_decodes + batch.num_prefills
    slots = batch.non_spec_state_indices_tensor[:count].long()
    starts = batch.non_spec_query_start_loc[: count + 1]
    row_cache, state_cache = layer.kv_cache
    if is_conv_state_dim_first():
        row_cache = row_cache.transpose(1, 2)
    state_cache = state_cache.view(*state_cache.shape[:2], layer.head_k_dim, layer.head_v_dim)
    rows, states = row_cache[slots], state_cache[slots]
    if batch.has_initial_state is not None:
        begins = ~batch.has_initial_state[:count]
        rows[begins], states[begins] = 0, 0
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", layer.conv1d.weight)
    weight = weight.view(qkv.shape[1], -1)
    x = causal_conv1d(qkv, weight, cu_seqlens=starts, initial_state=rows, activation="silu")
    row_cache[slots] = _last_rows(qkv, starts, rows)
    options = {"initial_state": states, "output_final_state": True}
    out, final = _mix(layer, x, a, b, cu_seqlens=starts, **options)
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
    "QwenGatedDeltaNetAttention": _engine_layer,
}
_ATTENTION = ("Qwen3_5Attention", "Qwen3NextAttention")
