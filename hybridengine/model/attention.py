"""Causal attention over packed sequences, registered with transformers as `ATTENTION`.

Input is one row `[1, T]` of concatenated sequences with boundaries `cu_seq_lens_q`, as for
flash-attn's `flash_attn_varlen_func`; transformers models pass `cu_seq_lens_q`, `cu_seq_lens_k` and
`max_length_q` through to the attention function. Sequences that share prefixes are packed as a
forest, which `subtree_ends` describes (see `hybridengine.kernels.tree_attention`). No token attends
to another sequence, and no mask is built.

- CUDA in half precision without a forest or sinks: `hybridengine.model.flash_attention`.
- Everything else: `tree_attention`, which calls FlashAttention where it can. On a CPU, and of a
  model with exact operators (`hybridengine.model.exact`), a sequence's result does not depend on
  the others, bit for bit.
- Without `cu_seq_lens_q`: every row is one sequence; padding masks and KV caches work as with
  transformers' `sdpa`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    masking_utils,
)
from transformers.masking_utils import sdpa_mask

from hybridengine.kernels import _check as check
from hybridengine.kernels._once import once
from hybridengine.kernels.attention.op import prepare as prepare_attention
from hybridengine.kernels.attention.op import tokens_first
from hybridengine.model.exact import is_exact
from hybridengine.model.flash_attention import flash_kernel
from hybridengine.run.errors import ModelError

ATTENTION = "hybridengine_varlen"

# Tensors and numbers that models pass on to attention and that do not change its result.
_IGNORED = {
    *("num_items_in_batch", "seq_idx", "cache_position", "position_embeddings", "labels"),
    *("logits_to_keep", "max_length_k", "use_cache"),
}


def attention_of(config: PretrainedConfig) -> str | dict[str, str]:
    """Return `attn_implementation`: of a vision-language model, packed in the language model alone.

    The vision tower attends among the patches of an image in both directions, with sdpa.
    """
    if config.get_text_config() is config:
        return ATTENTION
    return {"": ATTENTION, "text_config": ATTENTION, "vision_config": "sdpa"}


class BidirectionalSpan(NamedTuple):
    """n tokens, such as an image's, that attend to each other and to all tokens before them.

    token_index: int64 [p + n], the p tokens before the span in its sequence, then its own, in the
      order of their positions.
    num_tokens: n.
    in_windows: only in layers with a sliding window.
    """

    token_index: Tensor
    num_tokens: int
    in_windows: bool = False


class _ScoreOptions(NamedTuple):
    softmax_scale: float
    window_size: int | None  # keys per query, its own included; None: all
    softcap: float | None
    sinks: Tensor | None  # [H], a logit per query head in the denominator of its softmax


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    position_ids: Tensor | None = None,
    sequence_parallel: dist.ProcessGroup | None = None,
    subtree_ends: Tensor | None = None,
    tree_position_ids: Tensor | None = None,
    bidirectional_spans: Sequence[BidirectionalSpan] = (),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention: query [B, H, T, D], key, value [B, H_kv, T, D*] -> [B, T, H, D_v].

    Packed if `cu_seq_lens_q` (int32 [num_seqs + 1]) is given; B is then 1. H is a multiple of H_kv.
    A packed forest has its trees between the boundaries, its `subtree_ends` and, for a sliding
    window or exact operators, the depths of its tokens, `tree_position_ids` (integers [T] each).
    Tokens of `bidirectional_spans` of packed input also see the later ones of their span. Supports
    a sliding window, logit soft-cap, any scaling and attention sinks, `s_aux` [H]; differentiable.
    With `sequence_parallel`, the T of query, key and value counts this rank's tokens, and the other
    tensors are of all ranks.

    Raises:
        ModelError: a feature that is not supported (dropout, bidirectional attention, any argument
            that is not known, ...); the message names the layer and the feature.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if dropout > 0 or not causal or not _IGNORED.issuperset(kwargs):
        _check_arguments(module, dropout, causal, kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cu_seq_lens_q is None:
        if attention_mask is not None:  # [B, 1, L, L_kv], with padding, cache offset and window
            options = _ScoreOptions(scaling, sliding_window, softcap, s_aux)
            out = _masked_attention(query, key, value, attention_mask, options)
            return out.transpose(1, 2).contiguous(), None
        restarts = position_ids is not None and bool((position_ids.diff(dim=-1) != 1).any())
        _raise_if_unsupported(
            module,
            (
                query.shape[2] != key.shape[2],
                "a KV cache without a mask",
                "call the model through generate()",
            ),
            (
                restarts,
                "position_ids that restart, without cu_seq_lens_q",
                "pass cu_seq_lens_q, cu_seq_lens_k and max_length_q, or use a model that does",
            ),
        )
        rows = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
        cu_seq_lens_q, max_length_q = rows * query.shape[2], query.shape[2]
    else:
        is_packed = query.shape[0] == 1 and query.shape[2] == key.shape[2]
        ends_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        is_same = ends_k is cu_seq_lens_q
        in_window_of_tree = subtree_ends is not None and sliding_window
        if attention_mask is not None or not is_packed or not is_same or in_window_of_tree:
            # Not described unless they are wrong: a compiled graph would be of these lengths only.
            shapes = "" if is_packed else f"packed query {[*query.shape]} with key {[*key.shape]}"
            _raise_if_unsupported(
                module,
                (
                    attention_mask is not None,
                    "an attention_mask and cu_seq_lens_q",
                    "pass one, or use another model",
                ),
                (not is_packed, shapes, "pack into one row [1, T], with use_cache=False"),
                (
                    not is_same and not torch.equal(ends_k, cu_seq_lens_q),
                    "different cu_seq_lens_k and cu_seq_lens_q",
                    "pass the same tensor",
                ),
                (
                    in_window_of_tree and tree_position_ids is None,
                    "subtree_ends and a sliding window without tree_position_ids",
                    "pass the depth of every token",
                ),
            )
    if sequence_parallel is not None:
        heads = map(tokens_first, (query, key, value))
        query, key, value = gather_seq_scatter_heads(*heads, group=sequence_parallel)
        if s_aux is not None:
            s_aux = s_aux.chunk(sequence_parallel.size())[sequence_parallel.rank()]
    kind = check.signature(ATTENTION, query=query, key=key, value=value, sinks=s_aux)
    decided = (scaling, sliding_window, softcap, is_exact(module), max_length_q)

    def decide(ends: Tensor, trees: Tensor | None, depths: Tensor | None) -> Callable[..., Tensor]:
        return _decide((query, key, value, s_aux), *decided, ends, trees, depths)

    attend = once((kind, decided), decide, cu_seq_lens_q, subtree_ends, tree_position_ids)
    out = attend(query, key, value, s_aux)
    if spans := [span for span in bidirectional_spans if sliding_window or not span.in_windows]:
        flat = out if out.dim() == 3 else out.flatten(0, 1)
        q, k, v = map(tokens_first, (query, key, value))
        options = _ScoreOptions(scaling, sliding_window, softcap, s_aux)
        out = _attend_in_spans(flat, q, k, v, spans, options)
    if sequence_parallel is not None:
        out = gather_heads_scatter_seq(out, sequence_parallel)
    return out if out.dim() == 4 else out.unsqueeze(0), None


def _decide(
    heads: tuple[Tensor, Tensor, Tensor, Tensor | None],
    softmax_scale: float,
    window_size: int | None,
    softcap: float | None,
    exact: bool,
    max_seqlen: int | None,
    cu_seqlens: Tensor,
    subtree_ends: Tensor | None,
    position_ids: Tensor | None,
) -> Callable[..., Tensor]:
    """Return what computes attention of query, key, value and sinks in the layers of one kind."""
    query, _, value, sinks = heads
    flash = flash_kernel()
    if subtree_ends is None and sinks is None and not exact and flash.fits(query, value, softcap):
        longest = max_seqlen or int(cu_seqlens.diff().max())
        # Not the tensor itself, which would be kept by what is kept for it.
        given = (cu_seqlens.detach(), longest, softmax_scale, window_size, softcap)
        return lambda q, k, v, _: flash(q, k, v, *given)
    if subtree_ends is None:
        tokens = query.shape[0] if query.dim() == 3 else query.shape[0] * query.shape[2]
        layout = partial(torch.ops.hybridengine.sequence_layout, num_tokens=tokens)
        subtree_ends, position_ids = once(tokens, layout, cu_seqlens)
    options = (softmax_scale, window_size, softcap, exact, not exact, None)
    return prepare_attention(heads, subtree_ends, position_ids, *options)


def _check_arguments(
    module: nn.Module, dropout: float, causal: bool, others: Mapping[str, Any]
) -> None:
    """Raise ModelError for an argument that would change the result, and is not supported."""
    # Such are position_bias, indices, ...; flags and objects, such as those of router replay, reach
    # all modules of a layer.
    names = [
        name
        for name, x in others.items()
        if name not in _IGNORED and isinstance(x, Tensor | float | int) and not isinstance(x, bool)
    ]
    unknown = ", ".join(map(repr, names))
    _raise_if_unsupported(
        module,
        (dropout > 0, f"attention dropout {dropout}", "set it to 0 in the model's config.json"),
        (not causal, "bidirectional attention", "use a causal language model"),
        (
            others.get("output_attentions"),
            "output_attentions",
            "do not ask for them: no weights are formed",
        ),
        (unknown, f"the argument {unknown}", "choose a model whose attention has no such argument"),
    )


def gather_seq_scatter_heads(*tensors: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Exchange T / s tokens of all heads for all T tokens of H / s heads.

    Ulysses sequence parallelism (Jacobs et al. 2023, arXiv 2309.14509): each of the s ranks of a
    group runs the model on T / s tokens of one packed micro-batch, and only attention needs full
    sequences. `gather_heads_scatter_seq` is the way back. The gradients of the ranks sum to that of
    the full micro-batch; FSDP2 reduces them as for data parallelism.

    tensors: of one dtype, [T/s, H_i, ...]. The largest H_i is H, a multiple of s and of the others,
    such as the key-value heads. Return [T, H_i'/s, ...] each; heads are repeated if s does not
    divide their number.
    """
    size, heads = group.size(), max(x.shape[1] for x in tensors)
    if heads % size:
        raise ModelError(
            f"a layer has {heads} heads, which {size} ranks "
            "(ulysses_sequence_parallel_size) cannot split evenly; choose a divisor"
        )
    parts = []
    for x in tensors:
        repeats = size // math.gcd(x.shape[1], size)
        x = x.repeat_interleave(repeats, dim=1) if repeats > 1 else x
        parts.append(x.unflatten(1, (size, -1)))
    shapes = [part.shape[2:] for part in parts]
    widths = [shape.numel() for shape in shapes]
    sent = torch.cat([part.flatten(2) for part in parts], dim=-1).transpose(0, 1)
    received = exchange(sent, group).flatten(0, 1)
    return [x.unflatten(1, s) for x, s in zip(received.split(widths, -1), shapes, strict=True)]


def gather_heads_scatter_seq(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all T tokens of H / s heads for T / s tokens of all heads: -> [T/s, H, D]."""
    sent = out.unflatten(0, (group.size(), -1))
    return exchange(sent, group).transpose(0, 1).flatten(1, 2)


def exchange(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all of [s, ...], differentiable: send entry i to rank i, receive entry i from it."""
    return all_to_all_single_autograd(sent.contiguous(), None, None, group)


def _raise_if_unsupported(module: nn.Module, *cases: tuple[Any, str, str]) -> None:
    """Raise ModelError for the first case (condition, feature, remedy) whose condition is true."""
    for condition, feature, remedy in cases:
        if condition:
            layer = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
            raise ModelError(
                f"{ATTENTION}: {layer} uses {feature}, which is not supported: {remedy}"
            )


def causal_mask(use_vmap: bool = False, **kwargs: Any) -> Tensor | None:
    """Build a mask for transformers, only if there is padding or a KV cache."""
    if use_vmap:
        raise ModelError(
            f"{ATTENTION}: the model combines the causal mask with a mask of its own, which is not "
            "supported: choose a model whose masks are those of transformers"
        )
    no_cache = kwargs["q_length"] == kwargs["kv_length"]
    if no_cache and kwargs.get("attention_mask") is None:
        return None
    may_skip = kwargs.get("allow_is_causal_skip", True) and no_cache
    return sdpa_mask(**kwargs | {"allow_is_causal_skip": may_skip})


def _attend_in_spans(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Sequence[BidirectionalSpan],
    options: _ScoreOptions,
) -> Tensor:
    """Replace the rows of `spans` in `out` [T, H, D_v], the result of causal attention.

    Text sees an image causally, so only the rows of the image itself differ. A sliding window
    limits the keys before a token, not those after it in its span.
    """
    rows, results = [], []
    for index, length, _ in spans:
        own, window = index[-length:], options.window_size
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q[own], k[index], v[index]))
        mask = None
        if window is not None or options.softcap is not None or options.sinks is not None:
            positions = torch.arange(index.shape[0], device=index.device)
            distance = positions[-length:, None] - positions
            mask = distance < (index.shape[0] if window is None else window)
        rows.append(own)
        attended = _masked_attention(queries, keys, values, mask, options)
        results.append(attended[0].transpose(0, 1))
    return out.index_copy(0, torch.cat(rows), torch.cat(results))


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: _ScoreOptions
) -> Tensor:
    """Attention to keys where `mask` (bool, broadcastable to [B, 1, L, L_kv]) is True.

    mask: None: to all keys; only without a soft-cap and without sinks.
    """
    scale, softcap, sinks = options.softmax_scale, options.softcap, options.sinks
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    assert mask is not None
    groups, length = q.shape[1] // k.shape[1], k.shape[2]
    scores = q.unflatten(1, (-1, groups)) @ k.unsqueeze(2).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask.unsqueeze(-3), torch.finfo(scores.dtype).min)
    if sinks is not None:  # one more column, whose value would be zero
        column = sinks.to(scores.dtype).unflatten(0, (-1, groups))[..., None, None]
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return (weights[..., :length].to(q.dtype) @ v.unsqueeze(2)).flatten(1, 2)


@torch.library.custom_op(
    "hybridengine::sequence_layout",
    mutates_args=(),
    schema="(Tensor cu_seqlens, SymInt num_tokens) -> (Tensor, Tensor)",
)
def _sequence_layout(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the end of every token's sequence and its position in it, [num_tokens] each.

    An operator, as compiled layers cannot read the values that are checked.
    """
    lengths = cu_seqlens.diff()
    if cu_seqlens.device.type == "cpu" and (
        cu_seqlens[0] != 0 or cu_seqlens[-1] != num_tokens or bool((lengths < 0).any())
    ):
        raise ModelError(
            f"{ATTENTION}: cu_seq_lens_q is {cu_seqlens[:4].tolist()}...{int(cu_seqlens[-1])} over "
            f"{num_tokens} tokens; expected cu_seqlens that starts at 0, does not decrease and "
            "ends at the number of tokens"
        )
    starts, ends = (
        edges.repeat_interleave(lengths, output_size=num_tokens)
        for edges in (cu_seqlens[:-1], cu_seqlens[1:])
    )
    tokens = torch.arange(num_tokens, dtype=starts.dtype, device=starts.device)
    return ends, tokens - starts


@_sequence_layout.register_fake
def _(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    return cu_seqlens.new_empty(num_tokens), cu_seqlens.new_empty(num_tokens)


_has_ends: ContextVar[bool] = ContextVar("has_ends", default=False)
_find_sequences = masking_utils.find_packed_sequence_indices


@contextmanager
def sequence_ends_given() -> Iterator[None]:
    """Keep transformers from a search for sequences in position_ids, for which the host waits."""
    before = _has_ends.set(True)
    try:
        yield
    finally:
        _has_ends.reset(before)


def _find_sequences_unless_given(position_ids: Tensor) -> Tensor | None:
    return None if _has_ends.get() else _find_sequences(position_ids)


masking_utils.find_packed_sequence_indices = _find_sequences_unless_given
AttentionInterface.register(ATTENTION, varlen_attention)
AttentionMaskInterface.register(ATTENTION, causal_mask)
