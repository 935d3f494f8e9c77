"""What is called: for every function of hybridengine._C, what draws right arguments of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hybridengine._C as C
from tools.fuzz.draw import DTYPES, FLOAT_DTYPES, SHORT_DTYPES, Draw

# One function per function of the module: it returns arguments that are right.


def attention_forward(d: Draw) -> list:
    dtype, tokens, kv_heads = d.pick(FLOAT_DTYPES), d.size(70), d.pick((1, 1, 2))
    heads, dim, value_dim = kv_heads * d.pick((1, 2, 3)), d.size(33), d.size(33)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    inputs = [d.rows(d.floats(tokens, *shape, dtype=dtype)) for shape in shapes]
    ends = d.ends(d.size(4) or 1, tokens)
    subtree_ends = ends[1:].repeat_interleave(ends.diff())
    window = d.maybe(lambda: d.pick((1, 2, 5, 100)))
    position_ids = None if window is None else torch.arange(tokens, dtype=torch.int32)
    return [*inputs, subtree_ends, position_ids, 0.2, window, d.pick((None, None, 30.0))]


def attention_backward(d: Draw) -> list:
    query, key, value, *others = attention_forward(d)
    out = d.floats(*query.shape[:2], value.shape[-1], dtype=query.dtype)
    grad = d.rows(d.floats(*out.shape, dtype=query.dtype))
    return [grad, query, key, value, out, d.floats(query.shape[1], len(query)), *others]


def balance(d: Draw) -> list:
    return [d.ints(0, 100, d.size(40)).tolist(), d.pick((1, 2, 3, 8)), d.chance(0.5)]


def balance_by_tokens(d: Draw) -> list:
    return [d.ints(0, 100, d.size(40)).tolist(), d.pick((99, 100, 1000)), d.size(4), d.pick((1, 4))]


def gae(d: Draw) -> list:
    tokens = d.size(80)
    values, mask = d.maybe(lambda: d.floats(tokens)), d.maybe(lambda: d.bools(tokens))
    return [d.floats(tokens), values, d.ends(d.size(5) or 1, tokens), mask, 0.99, 0.95]


def group_advantage(d: Draw) -> list:
    rows, tokens = d.size(30), d.size(80)
    lengths = d.maybe(lambda: d.ints(0, 50, rows).float())
    with_tokens = rows > 0 and d.chance(0.5)
    cu_seqlens = d.ends(rows, tokens) if with_tokens else None
    mask = d.maybe(lambda: d.bools(tokens)) if with_tokens else None
    count = tokens if with_tokens else 0
    ids, estimator = d.ints(-3, 5, rows), d.random.randrange(7)
    return [d.floats(rows), ids, estimator, d.chance(0.5), 1e-6, lengths, cu_seqlens, mask, count]


def empty_from_pool(d: Draw) -> list:
    return [d.pick(([3, 4], [0], [], [1 << 20, 5], [2, 1 << 21])), d.pick(DTYPES)]


def has_mixed_gemm(d: Draw) -> list:
    return [d.pick(DTYPES)]


def log_prob_options(d: Draw, rows: int, vocab: int) -> list:
    first, total = d.pick(((0, vocab), (0, 2 * vocab), (vocab, 2 * vocab)))
    return [
        d.pick((1.0, 0.5)),
        d.maybe(lambda: d.floats(rows).abs() + 0.1),
        1.0,
        d.pick((0.0, 0.0, 30.0)),
        -100,
        d.maybe(lambda: d.bools(rows, vocab)),
        d.maybe(lambda: torch.tensor([first, total])),
    ]


def log_prob_forward(d: Draw) -> list:
    rows, vocab = d.size(), d.pick((d.size(70), 2049))
    logits = d.rows(d.floats(rows, vocab, dtype=d.pick(FLOAT_DTYPES)))
    labels = d.ints(0, vocab, rows)
    options = Options(log_prob_options(d, rows, vocab))
    return [logits, labels, options, d.chance(0.5), d.pick((None, torch.zeros(1).int()))]


def log_prob_partial(d: Draw) -> list:
    logits, labels, options, _, bad_label = log_prob_forward(d)
    return [logits, labels, options, bad_label]


def log_prob_backward(d: Draw) -> list:
    logits, labels, options, *_ = log_prob_forward(d)
    rows, vocab = logits.shape
    results = [d.floats(rows) for _ in range(4)]
    grad_rows = d.pick((rows, rows + 3))
    chosen = torch.randperm(grad_rows, generator=d.torch)[:rows].int()
    index = chosen if grad_rows > rows or d.chance(0.3) else None
    dtype = d.pick(SHORT_DTYPES) if logits.dtype == torch.float32 else logits.dtype
    out = logits if index is None and d.chance(0.2) else d.floats(grad_rows, vocab, dtype=dtype)
    grads = [d.maybe(lambda: d.floats(rows)) for _ in range(2)]
    return [logits, labels, options, results, *grads, out, index]


class Options(list):
    """The arguments of LogProbOptions, which is made when they are final."""


def masks(d: Draw) -> tuple[list[Tensor], list[int]]:
    numels = [d.pick((0, 1, 31, 32, 33, 100, 16384, 16385)) for _ in range(d.size(3))]
    made = [d.ints(-(2**31), 2**31, -(-n // 32), dtype=torch.int32) for n in numels]
    return [m * d.bools(len(m)) for m in made], numels


def count_changed(d: Draw) -> list:
    return list(masks(d))


def take_changed(d: Draw) -> list:
    given, numels = masks(d)
    dtype = d.pick(SHORT_DTYPES)
    sources = [d.floats(n, dtype=dtype) for n in numels]
    ends = C.count_changed(given, numels).cumsum(0)
    return [given, sources, ends, int(ends[-1]) if len(ends) else 0]


def mark_changed(d: Draw) -> list:
    numel = d.pick((0, 1, 31, 32, 33, 100, 3000))
    sent = d.floats(numel, dtype=d.pick(SHORT_DTYPES))
    current = sent.to(d.pick((*FLOAT_DTYPES, torch.float64)))
    return [current, sent, d.ints(0, 2, -(-numel // 32), dtype=torch.int32)]


def decode_linear(d: Draw) -> list:
    dtype, rows, n, k = d.pick((torch.float32, torch.bfloat16)), d.size(), d.size(70), d.size(70)
    x, weight = (d.rows(d.floats(m, k, dtype=dtype)) for m in (rows, n))
    out_dtype = d.pick((dtype, torch.float32))
    out = d.maybe(lambda: d.floats(rows, n, dtype=out_dtype))
    return [x, weight, d.maybe(lambda: d.floats(n, dtype=dtype)), out_dtype, out]


def rms_norm(d: Draw) -> list:
    dtype, rows, width = d.pick((torch.float32, torch.bfloat16)), d.size(), d.size(70)
    x, weight = d.rows(d.floats(rows, width, dtype=dtype)), d.floats(width, dtype=dtype)
    return [x, weight, 1e-6, d.pick((0.0, 1.0)), d.chance(0.5), d.chance(0.5)]


def rms_norm_backward(d: Draw) -> list:
    x, weight, _, offset, *_ = rms_norm(d)
    grad = d.rows(d.floats(*x.shape, dtype=x.dtype))
    return [grad, x, weight, d.floats(len(x)), offset]


def gated_activation(d: Draw) -> list:
    dtype, rows, width = d.pick((torch.float32, torch.bfloat16)), d.size(), d.size(70)
    gate, up = (d.rows(d.floats(rows, width, dtype=dtype)) for _ in range(2))
    return [gate, up, d.pick(("silu", "gelu_tanh"))]


def gated_activation_backward(d: Draw) -> list:
    gate, up, activation = gated_activation(d)
    return [d.rows(d.floats(*gate.shape, dtype=gate.dtype)), gate, up, activation]


def distillation(d: Draw) -> list:
    rows, vocab = d.size(), d.size(70)
    student, teacher = d.rows(d.floats(rows, vocab)), d.rows(d.floats(rows, vocab))
    transforms = [(1.0, d.pick((0.0, 30.0)), d.pick((1.0, 0.5))) for _ in range(2)]
    incoming = d.maybe(lambda: d.floats(rows))
    dtype = d.pick(FLOAT_DTYPES)
    grad = None if incoming is None else d.pick((student, d.floats(rows, vocab, dtype=dtype)))
    beta = d.pick((0.0, 0.3, 0.9, 1.0))
    return [student, teacher, *transforms, beta, d.floats(rows), incoming, grad]


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


def move_rows(d: Draw) -> list:
    leading, count, rows = d.pick((1, 2)), d.size(3), d.size(50)
    lead = [d.size(9) for _ in range(leading)]
    dtypes = [d.pick(DTYPES[:10]) for _ in range(count)]
    tails = [d.pick(([], [1], [3], [17], [2, 5])) for _ in range(count)]
    sources = [
        d.rows(d.floats(*lead, *tail).to(dtype)) for tail, dtype in zip(tails, dtypes, strict=True)
    ]
    index = d.ints(-1, math.prod(lead), rows)
    positions = d.maybe(lambda: d.ints(0, 3, rows))
    shifts = [0 if positions is None else d.pick((0, 1)) for _ in range(count)]
    return [sources, index, positions, leading, [rows], [d.pick((0.0, 1.0))] * count, shifts]


def pack_forest(d: Draw) -> list:
    tokens = d.ints(0, 3, d.size(100))
    return [tokens, d.ends(d.size(8) or 1, len(tokens), torch.int64)]


def pack_layout(d: Draw) -> list:
    mask = d.rows(d.bools(d.size(9), d.size(40)))
    dtypes = (torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64)
    return [mask.to(d.pick(dtypes)), d.pick((-1, int(mask.sum()), mask.numel() + 3))]


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
    options = [0.2, window, d.pick((None, None, 30.0))]
    return [query, cache, table, starts, lengths, *options, out]


def policy_loss(d: Draw) -> list:
    tokens = d.pick((d.size(80), 3000))
    mode = d.random.randrange(13)

    def optional(make: Callable[..., Tensor]) -> Tensor | None:
        return d.maybe(lambda: make(tokens))

    selected = d.bools(tokens) if mode in (7, 8) else optional(d.bools)
    optionals = [optional(make) for make in (d.floats, d.floats, d.floats)]
    cu_seqlens = d.ends(d.size(6) or 1, tokens)
    counts = d.maybe(lambda: d.floats(len(cu_seqlens) - 1).abs())
    denominators = d.maybe(lambda: torch.tensor([7.0, 3.0], dtype=torch.float64))
    count = d.pick((math.nan, 10.0))
    return [
        *(d.floats(tokens) for _ in range(3)),
        optional(d.bools),
        selected,
        *optionals,
        cu_seqlens,
        counts,
        denominators,
        mode,
        d.random.randrange(5),
        d.random.randrange(4),
        d.chance(0.5),
        d.chance(0.5),
        [0.2, 0.3, 3.0, 1.0, 1.05, 0.1, 0.1, 20.0, 10.0],
        [0.1, 0.01, 4.0, count, count],
        *(d.chance(0.5) for _ in range(3)),
    ]


def slices(d: Draw, lengths: tuple[list[int], list[int]]) -> Tensor:
    """Return a table [P, 16] of slices of tensors of these numbers of elements.

    Those of the destinations, the second ones, do not overlap.
    """
    table = []
    for number in range(d.size(5)):
        sizes = [1, 1, d.pick((1, 2, 3)), d.pick((0, 1, 2, 5))]
        row: list[int] = []
        strides: list[int] = []
        starts: list[int] = []
        for of_side in lengths:
            index = d.random.randrange(len(of_side)) if of_side else 0
            step = d.pick((1, 1, 2))
            side = [0, 0, step * sizes[3] + d.pick((0, 1)), step]
            reach = (sizes[2] - 1) * side[2] + (sizes[3] - 1) * side[3]
            room = (of_side[index] if of_side else 0) - reach - 1
            row.append(index)
            written = of_side is lengths[1]
            starts.append(32 * number if written else d.random.randint(0, max(room, 0)))
            strides += side
        table.append([*row, *starts, *sizes, *strides])
    return torch.tensor(table, dtype=torch.int64).reshape(-1, 16)


def tensors(d: Draw, dtype: torch.dtype, sizes: tuple[int, ...] = (40, 64, 100)) -> list[Tensor]:
    return [d.floats(d.pick(sizes)).to(dtype) for _ in range(d.pick((1, 1, 2)))]


WRITTEN = (160,)  # elements of a destination


def strided_copy(d: Draw) -> list:
    dtype = d.pick(DTYPES)
    is_float = dtype in (*FLOAT_DTYPES, torch.float64)
    sources = tensors(d, dtype)
    destinations = tensors(d, d.pick(FLOAT_DTYPES) if is_float else dtype, WRITTEN)
    lengths = [len(t) for t in sources], [len(t) for t in destinations]
    return [sources, destinations, slices(d, lengths)]


def copy_table(d: Draw) -> list:
    sources, destinations, table = strided_copy(d)
    blocks = d.maybe(lambda: d.ints(0, 4, len(table)))
    return [table, blocks, sources, destinations]


def block_absmax(d: Draw) -> list:
    sources = tensors(d, d.pick(FLOAT_DTYPES))
    table = slices(d, ([len(t) for t in sources], [64]))
    blocks, dtype = d.ints(0, 4, len(table)), d.pick(FLOAT_DTYPES)
    return [table, blocks, sources, d.ints(0, 9, 4, dtype=torch.int32), dtype]


def block_quantize(d: Draw) -> list:
    sources = tensors(d, d.pick(FLOAT_DTYPES))
    destinations = tensors(d, torch.float8_e4m3fn, WRITTEN)
    table = slices(d, ([len(t) for t in sources], [len(t) for t in destinations]))
    blocks, dtype = d.ints(0, 4, len(table)), d.pick(FLOAT_DTYPES)
    return [table, blocks, sources, destinations, d.floats(4), dtype]


def sample_tokens(d: Draw) -> list:
    rows, vocab = d.size(), d.pick((d.size(70) or 1, 600))
    logits = d.rows(d.floats(rows, vocab, dtype=d.pick(FLOAT_DTYPES)))
    top_p, min_p = (d.pick((d.floats(rows).sigmoid(), torch.ones(rows))) for _ in range(2))
    temperature = d.floats(rows).relu()
    top_k = d.ints(-1, d.pick((5, 700)), rows, dtype=torch.int32)
    seeds, positions = d.ints(0, 2**40, rows), d.ints(0, 100, rows)
    return [logits, temperature, top_k, top_p, min_p, seeds, positions, d.chance(0.5)]


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


def bit_checksum(d: Draw) -> list:
    return [d.ints(0, 256, d.pick((d.size(70), 1000)), dtype=torch.uint8)]


def encode_gaps(d: Draw) -> list:
    gaps = d.ints(1, d.pick((3, 300, 70000, 2**25)), d.size(60))
    start = d.pick((0, 5))
    return [start + gaps.cumsum(0), start]


def decode_gaps(d: Draw) -> list:
    positions, start = encode_gaps(d)
    gaps, width = C.encode_gaps(positions, start)
    end = int(positions[-1]) + 1 if len(positions) else start
    return [gaps, width, start, end, len(positions)]


def change_map(d: Draw) -> list:
    count, dtype = d.pick((1, 2)), d.pick(SHORT_DTYPES)
    table = slices(d, ([64] * count, [64]))
    table = table[(table[:, 4:8] > 0).all(1)].contiguous()
    chosen = [d.ints(0, 64, d.size(30)).unique() for _ in range(count)]
    indices = [x.to(d.pick((torch.int32, torch.int64))) for x in chosen]
    return [table, "cpu", indices, [d.floats(len(x), dtype=dtype) for x in indices]]


def change_scatter(d: Draw) -> list:
    table, device, indices, values = change_map(d)
    order = table[:, 1].argsort(stable=True)
    destination = d.floats(*WRITTEN, dtype=values[0].dtype)
    return [table[order], device, indices, values, [destination]]


# Calls of classes: their constructor and a method.


def _with_options(name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        made = [C.LogProbOptions(*x) if isinstance(x, Options) else x for x in arguments]
        return getattr(C, name)(*made)

    return call


def _method(method: str, num_made_of: int, make: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return getattr(make(*arguments[:num_made_of]), method)(*arguments[num_made_of:])

    return call


def _change_table(table: Any, device: Any) -> Any:
    return C.ChangeTable(table, torch.device(device))


_MAKERS = (
    attention_forward,
    attention_backward,
    balance,
    balance_by_tokens,
    gae,
    group_advantage,
    empty_from_pool,
    has_mixed_gemm,
    log_prob_forward,
    log_prob_partial,
    log_prob_backward,
    count_changed,
    take_changed,
    mark_changed,
    decode_linear,
    rms_norm,
    rms_norm_backward,
    gated_activation,
    gated_activation_backward,
    distillation,
    grouped_linear,
    grouped_weight_grad,
    mixed_gemm,
    move_rows,
    pack_forest,
    pack_layout,
    write_kv_cache,
    paged_attention,
    policy_loss,
    strided_copy,
    sample_tokens,
    sparse_logits,
    sparse_hidden_grad,
    sparse_weight_grad,
    bit_checksum,
    encode_gaps,
    decode_gaps,
)
_OF_CLASSES: tuple[tuple[Callable[[Draw], list], Callable[..., Any]], ...] = (
    (copy_table, _method("copy", 2, C.CopyTable)),
    (block_absmax, _method("absmax", 2, C.CopyTable)),
    (block_quantize, _method("quantize", 2, C.CopyTable)),
    (change_map, _method("map", 2, _change_table)),
    (change_scatter, _method("scatter", 2, _change_table)),
)
FUNCTIONS = [(make, _with_options(make.__name__)) for make in _MAKERS] + list(_OF_CLASSES)
