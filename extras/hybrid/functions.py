"""The functions that transformers' layers call, over the packed segments of the layer that runs.

Without segments each is transformers' own, which gets a padded batch, or a cache.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from hybridengine.hybrid.segments import Segments, Share
from hybridengine.kernels import causal_conv1d, linear_recurrence
from hybridengine.model.attention import gather_heads_scatter_seq
from hybridengine.run.errors import ModelError

__all__ = ["FORWARDS", "FUNCTIONS", "RUNNING", "packed_row", "packed_segments", "rebound"]


class _Running:
    """The segments of what runs; None: its sequences are not packed.

    call: of the model, in the forward pass alone.
    segments: of the decoder layer, also where gradient checkpointing computes it again.
    """

    call: Segments | None = None
    segments: Segments | None = None


RUNNING = _Running()


def packed_segments(*states: Any) -> dict[str, Any] | None:
    """Return the segments that run, as arguments; None: there are none. states: of a cache."""
    if (segments := RUNNING.segments) is None:
        return None
    if any(x is not None and x is not False for x in states):
        raise ModelError(
            "packed sequences with a cache are not supported by linear attention; set "
            "use_cache=False, or pad the sequences"
        )
    return {"cu_seqlens": segments.cu_seqlens, "parents": segments.parents}


def packed_row(x: Tensor) -> Tensor:
    """[1, ...] -> [...]"""
    if x.shape[0] != 1:
        raise ModelError(f"packed sequences are one row; got a batch of {x.shape[0]}")
    return x[0]


def _share() -> Share | None:
    """Where ranks share the batch, what this one has of it."""
    return None if RUNNING.segments is None else RUNNING.segments.share


def _gather_tokens(*tensors: Tensor) -> Sequence[Tensor]:
    """[T, H, ...]: where ranks share the batch, all tokens of the heads of this rank."""
    share = _share()
    return tensors if share is None else share.gather_tokens(*tensors)


def _scatter_tokens(out: Tensor) -> Tensor:
    """[T, H, D]: the tokens of this rank, of all heads."""
    share = _share()
    return out if share is None else gather_heads_scatter_seq(out, share.group)


def _own_heads(x: Tensor) -> Tensor:
    """[H, ...]: the heads of this rank."""
    share = _share()
    return x if share is None else x.chunk(share.group.size())[share.group.rank()]


def _convolution(
    original: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """hidden_states: [1, C, T]."""
    if (segments := packed_segments()) is None:
        return original(hidden_states, weight, bias, activation=activation, **options)
    silu = activation in ("silu", "swish")
    x = packed_row(hidden_states).t()  # the layer's own order in memory
    if (share := _share()) is not None:
        segments = share.of_convolution(x, weight.shape[1])
    out = causal_conv1d(x, weight, bias, activation="silu" if silu else None, **segments)
    if activation is not None and not silu:
        out = ACT2FN[activation](out)
    return out.t()[None]


def _delta_rule(
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet, with a g per head [1, T, H], and KDA, with one per channel [1, T, H, D_k]."""
    states = {"initial_state": initial_state, "output_final_state": output_final_state}
    norm = use_qk_l2norm_in_kernel
    if (segments := packed_segments(*states.values())) is None:
        options |= {**states, "use_qk_l2norm_in_kernel": norm}
        return original(query, key, value, g=g, beta=beta, **options)
    heads = _gather_tokens(*map(packed_row, (query, key, value, g, beta)))
    return _scatter_tokens(linear_recurrence(*heads, l2_norm=norm, **segments)[0])[None], None


def _mamba2(
    original: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **options: Any,
) -> Any:
    """Mamba2: hidden_states [1, T, H, P], dt [1, T, H], A and D [H], B and C [1, T, G, N]."""
    if (segments := packed_segments(initial_states, return_final_states)) is None:
        options |= {
            "D": D,
            "dt_bias": dt_bias,
            "initial_states": initial_states,
            "dt_softplus": dt_softplus,
            "dt_limit": dt_limit,
            "return_final_states": return_final_states,
        }
        return original(hidden_states, dt, A, B, C, chunk_size, **options)
    x, step, k, q = map(packed_row, (hidden_states, dt, B, C))
    step = _step(step, dt_bias, dt_softplus).clamp(*dt_limit)
    options = {"scale": 1.0, "delta_rule": False, **segments}
    heads = _gather_tokens(q, k, x, A.float() * step, step)
    out = _scatter_tokens(linear_recurrence(*heads, **options)[0]).float()
    if D is not None:
        out = out + x * D.float()[:, None]
    return out[None]


def _mamba2_fused(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return None for packed segments: the layer then calls the functions one by one."""
    return original(*args, **options) if packed_segments() is None else None


def _mamba1(
    original: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> Any:
    """Mamba: hidden_states, dt and z [1, D, T], A [D, N], B and C [1, N, T], D and delta_bias [D].

    Each channel is a head whose value has one entry, with a decay per entry of the state.
    """
    if (segments := packed_segments(return_last_state)) is None:
        options |= {
            "D": D,
            "z": z,
            "delta_bias": delta_bias,
            "delta_softplus": delta_softplus,
            "return_last_state": return_last_state,
        }
        return original(hidden_states, dt, A, B, C, **options)
    x, step, k, q = (packed_row(part).t() for part in (hidden_states, dt, B, C))
    step = _step(step, delta_bias, delta_softplus)
    q, k = (part.to(x.dtype)[:, None] for part in (q, k))
    q, k, v, rate = _gather_tokens(q, k, x[..., None], step)
    g = rate[..., None] * _own_heads(A.float())
    out, _ = linear_recurrence(q, k, v, g, rate, scale=1.0, delta_rule=False, **segments)
    out = _scatter_tokens(out)[..., 0].float()
    if D is not None:
        out = out + x * D.float()
    if z is not None:
        out = out * F.silu(packed_row(z).t())
    return out.t()[None]


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """The step sizes [T, H] of a Mamba layer, float32."""
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if softplus else dt


def _lightning_attention(
    original: Callable[..., Any], layer: Any, hidden_states: Tensor, **arguments: Any
) -> tuple[Tensor, None]:
    """MiniMax's layer, which calls no function that could be replaced. hidden_states: [1, T, H]."""
    if (segments := packed_segments(arguments.get("past_key_values"))) is None:
        return original(layer, hidden_states=hidden_states, **arguments)
    x = packed_row(hidden_states)
    heads = layer.act_fn(layer.qkv_proj(x)).unflatten(1, (layer.num_attention_heads, -1))
    q, k, v = heads.split(layer.head_dim, 2)
    g = -layer.slope_rate.flatten().expand(len(x), -1)
    heads = _gather_tokens(q, k, v, g)
    out, _ = linear_recurrence(*heads, scale=1.0, delta_rule=False, **segments)
    out = _scatter_tokens(out)
    out = torch.sigmoid(layer.output_gate(x)) * layer.norm(out.flatten(1))
    return layer.out_proj(out)[None], None


def rebound(forward: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the code of a class's forward, with other globals of these names."""
    own: Any = inspect.unwrap(forward)
    # torch.compile would look a global up by the name of the module.
    scope = {name: x for name, x in own.__globals__.items() if name != "__name__"} | dict(names)
    made = types.FunctionType(own.__code__, scope, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


# By the names of transformers: the first argument of each is the function that it replaces.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _mamba2_fused,
    "mamba_selective_scan": _mamba1,
}
FORWARDS: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": _lightning_attention}
