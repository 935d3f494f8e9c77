"""paged_attention: attention over a paged key-value cache, with the bits of `tree_attention`.

A query has the bits that `tree_attention` (on a GPU with `batch_invariant`) gives the token at its
position of its sequence, whatever the batch, the split of a prompt into chunks, the size of blocks
and the number of threads.

The cache is [num_blocks, H_kv, block_size, D + D_v]. `write_kv_cache` writes it, as the backend
reads it. On a GPU a row is a key, then its value. On a CPU a block of a head begins with its keys
as [D / n, block_size, n], followed by its values as [block_size / n, D_v, n], where n is 2 for
bfloat16 and 1 for float32: consecutive keys are in one vector register, and pairs are those of
AVX512-BF16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _check as check
from ._backend import choose_backend, native, register_backends
from ._per_token import unit_inner_stride
from .attention import tree_attention

OP, WRITE_OP = "paged_attention", "write_kv_cache"
_DTYPES = (torch.float32, torch.bfloat16)

register_backends(OP, cpu=("cpp", "reference"), cuda=("triton", "reference"))


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Write keys and values of new tokens to the cache.

    On a CPU a token whose key or value is not finite becomes a key of NaN and zeros and a value of
    zeros: queries that see it become NaN, others are not affected.

    Args:
        key: [T, H_kv, D]; value: [T, H_kv, D_v], of the dtype of the cache.
        kv_cache: [num_blocks, H_kv, block_size, D + D_v], float32 or bfloat16; block_size, D and
            D_v are multiples of 16.
        slot_mapping: [T] int64, block * block_size + offset of each token; negative: not written.
        backend: `cpp`, `triton` or `reference`; None takes the best one.

    Raises:
        ValueError: shapes, dtypes, devices or (on a CPU) slots that do not fit.
    """
    check.untransformed(WRITE_OP, key=key, value=value, kv_cache=kv_cache)
    key, value = unit_inner_stride(key), unit_inner_stride(value)
    slot_mapping = slot_mapping.contiguous()
    chosen = choose_backend(OP, kv_cache.device, backend)
    if chosen == "triton":
        from . import paged_attention_triton as module

        _check_cache(kv_cache, key, value)
        module.write_kv_cache(key, value, kv_cache, slot_mapping)
        return
    if chosen == "cpp":
        native().write_kv_cache(key, value, kv_cache, slot_mapping)
        return
    check.contiguous(WRITE_OP, kv_cache=kv_cache)
    finite = (key.isfinite().all(-1) & value.isfinite().all(-1))[..., None]
    key, value = key.where(finite, 0), value.where(finite, 0)
    key[..., :1] = key[..., :1].where(finite, torch.nan)
    written = slot_mapping >= 0
    keys, values = cache_views(kv_cache, key.shape[2])
    in_keys, in_values = slot_indices(slot_mapping[written], kv_cache)
    keys[in_keys] = key[written].unflatten(2, keys.shape[3:])
    values[in_values] = value[written]


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute causal attention of the last tokens of sequences whose keys and values are cached.

    Args:
        query: [T, H, D], the queries of all sequences; H is a multiple of H_kv.
        kv_cache: [num_blocks, H_kv, block_size, D + D_v] as `write_kv_cache` writes it, with the
            keys and values of the queries themselves.
        block_table: [S, max_blocks] int32, the blocks of each sequence.
        query_start_loc: [S + 1] int32, where the queries of each sequence begin.
        seq_lens: [S] int32, tokens of each sequence, of which the queries are the last.
        sinks, softmax_scale, window_size, softcap: see `tree_attention`.
        out: [T, H, D_v], contiguous, to write to; None: a new tensor.
        backend: `cpp`, `triton` or `reference`; None takes the best one.

    Returns:
        [T, H, D_v] of the dtype of `query`, without a gradient.

    Raises:
        ValueError: shapes, dtypes, devices or numbers that do not fit; on a CPU also blocks outside
            of the cache.

    Example:
        >>> cache = torch.zeros(3, 1, 16, 32)
        >>> write_kv_cache(torch.zeros(2, 1, 16), torch.ones(2, 1, 16), cache, torch.arange(16, 18))
        >>> table, starts, lengths = (torch.tensor(x).int() for x in ([[1]], [0, 1], [2]))
        >>> paged_attention(torch.zeros(1, 1, 16), cache, table, starts, lengths)[0, 0, :2]
        tensor([1., 1.])
    """
    sizes: check.Sizes = {}
    check.shape(OP, "query", query, "T H D", sizes)
    check.shape(OP, "kv_cache", kv_cache, "num_blocks H_kv block_size C", sizes)
    check.dtype(OP, "kv_cache", kv_cache, _DTYPES)
    check.untransformed(OP, query=query, kv_cache=kv_cache, sinks=sinks, out=out)
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    scale = check.number(OP, "softmax_scale", scale)
    if window_size is not None:
        check.integer(OP, "window_size", window_size, at_least=1)
    if softcap is not None:
        softcap = check.number(OP, "softcap", softcap, above=0)
    value_dim = kv_cache.shape[3] - query.shape[2]
    if out is None:
        out = query.new_empty(*query.shape[:2], max(value_dim, 0))
    check.contiguous(OP, out=out)
    if sinks is not None:
        check.same_device(OP, query=query, sinks=sinks)
        check.floats(OP, sinks=sinks)
        check.shape(OP, "sinks", sinks, "H", sizes)
        sinks = sinks.float().contiguous()
    query, block_table = unit_inner_stride(query), unit_inner_stride(block_table)
    sequences = (block_table, query_start_loc.contiguous(), seq_lens.contiguous())
    options = (scale, window_size, softcap, sinks)
    chosen = choose_backend(OP, query.device, backend)
    if chosen == "triton":
        from . import paged_attention_triton as module

        _check_operands(query, kv_cache, *sequences, out)
        module.paged_attention(query, kv_cache, sequences, *options, out)
        return out
    if chosen == "cpp":
        native().paged_attention(query, kv_cache, *sequences, *options, out)
        return out
    _check_operands(query, kv_cache, *sequences, out)
    check.cu_seqlens(OP, query_start_loc, query.shape[0], name="query_start_loc")
    keys, values = cache_views(kv_cache, query.shape[2])
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        positions = torch.arange(length, device=query.device)
        size = kv_cache.shape[2]
        slots = block_table[i].long()[positions // size] * size + positions % size
        in_keys, in_values = slot_indices(slots, kv_cache)
        own = query.new_zeros(length, *query.shape[1:])
        first = length - (rows.stop - rows.start)
        own[first:] = query[rows]
        out[rows] = tree_attention(
            own,
            keys[in_keys].flatten(2),
            values[in_values],
            torch.full_like(positions, length),
            positions,
            sinks=sinks,
            softmax_scale=scale,
            window_size=window_size,
            softcap=softcap,
            backend="reference",
        )[first:]
    return out


def _check_cache(kv_cache: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise ValueError unless keys [T, H_kv, D] and values [T, H_kv, D_v] fit the cache."""
    heads, width = kv_cache.shape[1], kv_cache.shape[3]
    check.dtype(WRITE_OP, "kv_cache", kv_cache, _DTYPES)
    for name, rows in (("key", key), ("value", value)):
        check.shape(WRITE_OP, name, rows, "T H_kv D", {"H_kv": (heads, "kv_cache")})
        check.dtype(WRITE_OP, name, rows, (kv_cache.dtype,))
    if key.shape[2] + value.shape[2] != width or not kv_cache.is_contiguous():
        raise ValueError(
            f"{WRITE_OP}: kv_cache has shape {list(kv_cache.shape)} and strides "
            f"{list(kv_cache.stride())}; expected a contiguous one of rows of {key.shape[2]} + "
            f"{value.shape[2]} elements."
        )


def _check_operands(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
) -> None:
    """Raise ValueError unless the shapes and dtypes fit; values on a GPU are not read."""
    tokens, heads, width = query.shape
    kv_heads, value_width = kv_cache.shape[1], kv_cache.shape[3] - width
    check.dtype(OP, "query", query, (kv_cache.dtype,))
    check.dtype(OP, "out", out, (query.dtype,))
    for name, value in (("block_table", block_table), ("seq_lens", seq_lens)):
        check.dtype(OP, name, value, (torch.int32,))
    check.dtype(OP, "query_start_loc", query_start_loc, (torch.int32,))
    fits = (
        (heads % kv_heads == 0, "a number of query heads that is a multiple of the cache's"),
        (value_width > 0, "a cache of rows longer than a query"),
        (out.shape == (tokens, heads, value_width), f"out of [{tokens}, {heads}, {value_width}]"),
        (len(query_start_loc) == len(seq_lens) + 1, "one query_start_loc more than seq_lens"),
        (len(block_table) == len(seq_lens), "a row of block_table for each of seq_lens"),
        (block_table.stride(1) == 1, "block_table with contiguous rows"),
        (kv_cache.is_contiguous(), "a contiguous kv_cache"),
    )
    for fit, expected in fits:
        if not fit:
            raise ValueError(f"{OP}: query has shape {list(query.shape)}; expected {expected}.")


def cache_views(kv_cache: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return keys [num_blocks, block_size, H_kv, D / n, n] and values [..., D_v] of the cache.

    The values have the dimensions [num_blocks, block_size / n, n, H_kv, D_v].
    """
    n = 4 // kv_cache.element_size()
    blocks, heads, size, width = kv_cache.shape
    flat = kv_cache.view(blocks, heads, size * width)
    keys = flat[..., : size * dim].view(blocks, heads, dim // n, size, n)
    values = flat[..., size * dim :].view(blocks, heads, size // n, width - dim, n)
    return keys.permute(0, 3, 1, 2, 4), values.permute(0, 2, 4, 1, 3)


def slot_indices(slots: Tensor, kv_cache: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the indices of slots in the two views."""
    size, n = kv_cache.shape[2], 4 // kv_cache.element_size()
    blocks, offsets = slots // size, slots % size
    return (blocks, offsets), (blocks, offsets // n, offsets % n)
