"""What is called of attention and linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.kernels._backend import native
from tools.fuzz.draw import DTYPES, FLOAT_DTYPES, SHORT_DTYPES, Draw


def attention_forward(d: Draw) -> list:
    dtype, tokens, kv_heads = d.pick(FLOAT_DTYPES), d.size(70), d.pick((1, 1, 2))
    heads, dim, value_dim = kv_heads * d.pick((1, 2, 3)), d.size(33), d.size(33)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    inputs = [d.rows(d.floats(tokens, *shape, dtype=dtype)) for shape in shapes]
    ends = d.ends(d.size(4) or 1, tokens)
    subtree_ends = ends[1:].repeat_interleave(ends.diff())
    window = d.maybe(lambda: d.pick((1, 2, 5, 100)))
    position_ids = None if window is None else torch.arange(tokens, dtype=torch.int32)
    sinks = d.maybe(lambda: d.floats(heads))
    return [*inputs, sinks, subtree_ends, position_ids, 0.2, window, d.pick((None, None, 30.0))]


def attention_backward(d: Draw) -> list:
    query, key, value, _, *others = attention_forward(d)
    out = d.floats(*query.shape[:2], value.shape[-1], dtype=query.dtype)
    grad = d.rows(d.floats(*out.shape, dtype=query.dtype))
    return [grad, query, key, value, out, d.floats(query.shape[1], len(query)), *others]


def paged(d: Draw) -> tuple[Tensor, int, int, int]:
    """A cache [blocks, kv_heads, block_size, dim + value_dim]; dim, value_dim and block_size."""
    dtype = d.pick((torch.float32, torch.bfloat16))
    dim, value_dim, block_size = d.pick((16, 48)), d.pick((16, 32)), d.pick((16, 32, 80))
    cache = d.floats(1 + d.size(9), d.pick((1, 2)), block_size, dim + value_dim, dtype=dtype)
    return cache, dim, value_dim, block_size


def write_kv_cache(d: Draw) -> list:
    cache, dim, value_dim, block_size = paged(d)
    tokens, dtype = d.size(), cache.dtype
    key, value = (
        d.rows(d.floats(tokens, cache.shape[1], n, dtype=dtype)) for n in (dim, value_dim)
    )
    return [key, value, cache, d.ints(-1, len(cache) * block_size, tokens, dtype=torch.int64)]


def paged_attention(d: Draw) -> list:
    cache, dim, value_dim, block_size = paged(d)
    sequences, blocks, heads = d.size(4), d.pick((1, 3, 8)), cache.shape[1] * d.pick((1, 3, 7))
    counts = d.ints(0, d.pick((2, 17)), sequences, dtype=torch.int32)
    lengths = counts + d.ints(0, blocks * block_size - 16, sequences, dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
    table = d.ints(0, len(cache), sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    tokens, window = int(starts[-1]), d.maybe(lambda: d.pick((1, 5, 100)))
    query = d.rows(d.floats(tokens, heads, dim, dtype=cache.dtype))
    out = d.floats(tokens, heads, value_dim, dtype=cache.dtype)
    options = [0.2, window, d.pick((None, None, 30.0)), d.maybe(lambda: d.floats(heads))]
    return [query, cache, table, starts, lengths, *options, out]


def rms_norm(d: Draw) -> list:
    dtype, rows, width = d.pick((torch.float32, torch.bfloat16)), d.size(), d.size(70)
    x, weight = d.rows(d.floats(rows, width, dtype=dtype)), d.floats(width, dtype=dtype)
    residual = d.floats(rows, width, dtype=dtype) if d.chance(0.5) else None
    if residual is None and d.chance(0.5):
        x = d.rows(d.floats(rows, d.size(4), width, dtype=dtype))
    return [x, weight, 1e-6, d.pick((0.0, 1.0)), d.chance(0.5), d.chance(0.5), residual]


def layer_norm(d: Draw) -> list:
    x, weight, eps, *_ = rms_norm(d)
    bias = d.maybe(lambda: d.floats(*weight.shape, dtype=x.dtype))
    return [x, weight, bias, eps, d.chance(0.5)]


def layer_norm_backward(d: Draw) -> list:
    return rms_norm_backward(d)[:-1]


def add_scaled_(d: Draw) -> list:
    dtype, rows, width = d.pick((torch.float32, torch.bfloat16)), d.size(), d.size(70)
    out, update = (d.rows(d.floats(rows, width, dtype=dtype)) for _ in range(2))
    return [out, update, d.pick((0.5, 2.0, -1.7))]


def rotary_(d: Draw) -> list:
    dtype, rows, half = d.pick((torch.float32, torch.bfloat16)), d.size(), d.size(20)
    x = d.floats(rows, d.size(4), 2 * half + d.size(3), dtype=dtype)
    table_dtype = d.pick((torch.float32, dtype))
    cos, sin = (d.floats(9, half, dtype=table_dtype) for _ in range(2))
    return [x, d.ints(0, 9, rows), cos, sin, d.chance(0.5)]


def rms_norm_backward(d: Draw) -> list:
    x, weight, _, offset, *_ = rms_norm(d)
    x = x.flatten(0, -2)
    grad = d.rows(d.floats(*x.shape, dtype=x.dtype))
    return [grad, x, weight, d.floats(len(x)), offset]


def gated_activation(d: Draw) -> list:
    dtype = d.pick((torch.float32, torch.bfloat16))
    shape = [*d.pick(((), (d.size(4),))), d.size(), d.size(70)]
    gate, up = (d.rows(d.floats(*shape, dtype=dtype)) for _ in range(2))
    return [gate, up, d.pick(("silu", "gelu", "gelu_tanh", "sigmoid", "softplus"))]


def delta_gates(d: Draw) -> list:
    dtype, rows, heads = d.pick((torch.float32, torch.bfloat16)), d.size(), d.size(40)
    a, b = (d.rows(d.floats(rows, heads, dtype=dtype)) for _ in range(2))
    return [a, b, d.floats(heads), d.floats(heads, dtype=dtype)]


def gated_activation_backward(d: Draw) -> list:
    gate, up, activation = gated_activation(d)
    gate, up = gate.flatten(0, -2), up.flatten(0, -2)
    return [d.rows(d.floats(*gate.shape, dtype=gate.dtype)), gate, up, activation]


def causal_conv1d(d: Draw) -> list:
    dtype, tokens, channels = d.pick(FLOAT_DTYPES), d.size(150), d.size(300)
    width, segments = d.pick((2, 3, 4)), d.size(5) or 1
    bias = d.maybe(lambda: d.floats(channels))
    state = d.maybe(lambda: d.floats(segments, width - 1, channels, dtype=dtype))
    x = d.rows(d.floats(tokens, channels, dtype=dtype))
    ends = d.ends(segments, tokens)
    return [x, d.floats(width, channels), bias, ends, parents(d, segments), state, d.chance(0.5)]


def causal_conv1d_update(d: Draw) -> list:
    dtype, tokens, channels = d.pick(FLOAT_DTYPES), d.size(9), d.size(300)
    width, slots = d.pick((2, 3, 4)), tokens + d.size(3)
    cache = d.floats(slots, width, channels, dtype=dtype)[:, 1:]
    x, weight = d.floats(tokens, channels, dtype=dtype), d.floats(channels, width, dtype=dtype)
    return [
        d.rows(x),
        weight,
        cache,
        torch.randperm(slots, generator=d.torch)[:tokens].int(),
        d.chance(0.5),
    ]


def causal_conv1d_backward(d: Draw) -> list:
    x, *others = causal_conv1d(d)
    wanted = [d.chance(0.8) for _ in range(4)]
    return [d.rows(d.floats(*x.shape, dtype=x.dtype)), x, *others, wanted]


def parents(d: Draw, segments: int) -> Tensor | None:
    earlier = [d.random.randint(-1, segment - 1) for segment in range(segments)]
    return d.maybe(lambda: torch.tensor(earlier, dtype=torch.int32))


def linear_recurrence(d: Draw) -> list:
    dtype, tokens, k_heads = d.pick(FLOAT_DTYPES), d.size(150), d.pick((1, 2))
    heads, dim, value_dim = k_heads * d.pick((1, 2)), 1 + d.size(20), 1 + d.size(70)
    segments = d.size(5) or 1
    shapes = ((k_heads, dim), (k_heads, dim), (heads, value_dim))
    inputs = [d.rows(d.floats(tokens, *shape, dtype=dtype)) for shape in shapes]
    g = -d.floats(tokens, heads, *d.pick(((), (dim,)))).abs()
    beta = d.maybe(lambda: d.floats(tokens, heads))
    state = d.maybe(lambda: d.floats(segments, heads, dim, value_dim))
    tensors = [*inputs, g, beta, d.ends(segments, tokens), parents(d, segments), state]
    return [*tensors, 0.3, *(d.chance(0.5) for _ in range(4))]


def linear_recurrence_update(d: Draw) -> list:
    q, k, v, g, beta, *_ = linear_recurrence(d)
    count = len(q) + d.size(3)
    states = d.floats(count, v.shape[1] * q.shape[2] * v.shape[2] + 1)[:, 1:]
    states = states.unflatten(1, (v.shape[1], q.shape[2], v.shape[2]))
    slots = torch.randperm(count, generator=d.torch)[: len(q)].int()
    return [q, k, v, g, beta, states, slots, 0.3, d.chance(0.5), d.chance(0.5)]


def linear_recurrence_backward(d: Draw) -> list:
    *tensors, scale, delta, l2_norm, _, _ = linear_recurrence(d)
    options = [scale, delta, l2_norm]
    out, states, final = native().linear_recurrence(*tensors, *options, True, True)
    grad_final = d.maybe(lambda: d.floats(*final.shape))
    grad = d.rows(d.floats(*out.shape, dtype=out.dtype))
    return [grad, grad_final, *tensors, states, *options, [d.chance(0.8) for _ in range(6)]]


def decode_linear(d: Draw) -> list:
    dtype, rows, n, k = d.pick((torch.float32, torch.bfloat16)), d.size(), d.size(70), d.size(70)
    x, weight = (d.rows(d.floats(m, k, dtype=dtype)) for m in (rows, n))
    out_dtype = d.pick((dtype, torch.float32))
    out = d.maybe(lambda: d.floats(rows, n, dtype=out_dtype))
    return [x, weight, d.maybe(lambda: d.floats(n, dtype=dtype)), out_dtype, out]


def grouped_linear(d: Draw) -> list:
    dtype, n, k = d.pick((torch.float32, torch.bfloat16)), d.size(70), d.size(300)
    ends, rows = counts(d)
    x, out = (d.rows(d.floats(rows, m, dtype=dtype)) for m in (k, n))
    return [x, expert_weights(d, len(ends) - 1, n, k, dtype), ends, out]


def grouped_weight_grad(d: Draw) -> list:
    dtype, n, k = d.pick((torch.float32, torch.bfloat16)), d.size(70), d.size(70)
    ends, rows = counts(d)
    grad, x = (d.rows(d.floats(rows, m, dtype=dtype)) for m in (n, k))
    return [grad, x, ends, expert_weights(d, len(ends) - 1, n, k, dtype)]


def expert_weights(d: Draw, groups: int, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    if d.chance(0.5):
        return d.floats(groups, k, n, dtype=dtype).transpose(1, 2)
    return d.floats(groups, n, k, dtype=dtype)


def counts(d: Draw) -> tuple[torch.Tensor, int]:
    sizes = [d.size(40) for _ in range(d.pick((0, 1, 3, 9)))]
    return torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32), sum(sizes)


def mixed_gemm(d: Draw) -> list:
    m, n, k, dtype = d.size(40), d.size(70), d.size(70), d.pick(SHORT_DTYPES)
    accumulate = d.chance(0.3)
    bias = None if accumulate else d.maybe(lambda: d.floats(n))
    a, b = (d.rows(d.floats(x, k, dtype=dtype)) for x in (m, n))
    return [a, b, bias, d.rows(d.floats(m, n)), accumulate]


def sparse_logits(d: Draw) -> list:
    dtype, rows, vocab, width = d.pick(FLOAT_DTYPES), d.size(), d.size(30), d.size(40)
    hidden, weight = (d.rows(d.floats(n, width, dtype=dtype)) for n in (rows, vocab))
    entries = d.size(60) if rows else 0
    ids = d.ints(0, 2 * vocab, entries, dtype=torch.int32)
    ends = d.ends(rows, entries) if rows else torch.zeros(1, dtype=torch.int32)
    return [hidden, weight, ids, ends, d.pick((0, 0, vocab))]


def sparse_hidden_grad(d: Draw) -> list:
    arguments = sparse_logits(d)
    return [*arguments, d.floats(len(arguments[2]))]


def sparse_weight_grad(d: Draw) -> list:
    arguments, accumulate = sparse_hidden_grad(d), d.chance(0.5)
    weight = arguments[1]
    dtype = torch.float32 if accumulate else weight.dtype
    return [*arguments, d.floats(*weight.shape, dtype=dtype), accumulate]


def has_mixed_gemm(d: Draw) -> list:
    return [d.pick(DTYPES)]


FUNCTIONS = (
    attention_forward,
    attention_backward,
    write_kv_cache,
    paged_attention,
    rms_norm,
    rms_norm_backward,
    layer_norm,
    layer_norm_backward,
    add_scaled_,
    rotary_,
    gated_activation,
    gated_activation_backward,
    delta_gates,
    decode_linear,
    grouped_linear,
    grouped_weight_grad,
    causal_conv1d,
    causal_conv1d_backward,
    causal_conv1d_update,
    linear_recurrence,
    linear_recurrence_backward,
    linear_recurrence_update,
    mixed_gemm,
    has_mixed_gemm,
    sparse_logits,
    sparse_hidden_grad,
    sparse_weight_grad,
)
