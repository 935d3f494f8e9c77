"""token_log_probs: log-probability and entropy of every token, from logits, in one pass.

With x the logits of a row, y = softcap * tanh(logit_scale * x / softcap) (logit_scale * x without
a soft-cap), z = y / temperature and p = softmax(z):

    log_prob = log p[token]      entropy = -sum_v p[v] log p[v]
    d loss / d z[v] = p[v] * (-(g + h * entropy) - h * log p[v])  +  g * [v == token]

with g, h the gradients of log_prob and entropy. The forward reads the logits once; the backward
reads them once and writes their gradient once. Only [T] float32 vectors are saved besides the
logits. Each row is reduced by itself in a fixed order: results do not depend on the other rows, on
the split of the batch or on the number of threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from .. import _check as check
from .._library import custom_op
from .._per_token import compute_dtype
from .options import RowOptions, in_shape, row_options
from .rows import backend_for, rows_backward, rows_forward
from .selected import selected_entries, selected_results


class RowStats(NamedTuple):
    """Further results per row, [T] float32, without gradient."""

    lse: Tensor  # log sum exp z
    max_logit: Tensor  # max y, before the temperature
    sum_p_squared: Tensor


def token_log_probs(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    return_stats: bool = False,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> tuple[Any, ...]:
    """Compute the log-probability of `token_ids` and the entropy of every row of `logits`.

    Args:
        logits: [..., V] float32, bfloat16 or float16; float64 uses the reference backend.
        token_ids: [...] int32 or int64; or [..., K]: K entries of every row, without a group.
        temperature: a number, or a tensor [...]; above 0.
        logit_scale: multiplies the logits first; above 0.
        softcap: y = softcap * tanh(logit_scale * x / softcap); None: no soft-cap.
        ignore_index: rows with this label are not read; their outputs and gradients are 0.
        vocab_mask: [..., V] bool, or 0 and 1; False removes an entry from the distribution (to
            replay top-k or top-p sampling).
        group: vocabulary-parallel ranks. Every rank has a slice of the vocabulary, [..., V_r], in
            rank order and of any size (as torch.chunk and DTensor split it; empty slices too). The
            forward exchanges the sizes and one [T, 5] tensor, the backward nothing; neither waits
            for a GPU.
        return_stats: also return a `RowStats`.
        inplace_backward: write the gradient over `logits` and increment their version counter, so
            that autograd raises an error if something else needs them.
        backend: `cpp`, `cuda`, `triton` or `reference`; None: the best one.

    Returns:
        log_probs in the shape of token_ids and entropy [...], float32 for any dtype of the logits,
        both differentiable with respect to `logits`, once and in reverse mode. A logit of -inf
        removes its entry, like
        a masked one, and the token of such an entry has log-prob -inf; with a soft-cap, infinite
        logits become finite (-softcap and softcap) first. A row that has NaN or +inf, or no entry
        left, gives NaN.

    Raises:
        IndexError: a label outside [0, V) other than ignore_index. On a CUDA device, where the
            check would synchronize, such a row gives NaN and `check_labels` raises.
        ValueError: a wrong shape, dtype, device, temperature, scale or soft-cap. (On a CUDA device
            a per-token temperature that is not above 0 gives NaN instead.)
        RuntimeError, NotImplementedError: a second derivative; a forward-mode derivative.

    Source: online softmax, Milakov & Gimelshein, arXiv 1805.02867.

    Examples:
        >>> log_probs, entropy = token_log_probs(torch.zeros(1, 4), torch.tensor([2]))
        >>> round(log_probs.item(), 4), round(entropy.item(), 4)
        (-1.3863, 1.3863)
    """
    op = "token_log_probs"
    given = (temperature, logit_scale, softcap, ignore_index, vocab_mask)
    if token_ids.dim() == logits.dim():
        token_ids = check_logits(op, logits, token_ids, "... K")
        if group is not None or not token_ids.shape[-1]:
            raise ValueError(
                f"{op}: token_ids has shape {list(token_ids.shape)}"
                + (" and group is given" if group is not None else "")
                + "; expected [...] with a group, [..., K] with K > 0 without one."
            )
        row_options(op, token_ids[..., 0], logits.shape[-1], *given)  # checks them
        labels, *entries = selected_entries(logits, token_ids, *given)
        results = token_log_probs(
            logits,
            labels,
            temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            ignore_index=ignore_index,
            vocab_mask=vocab_mask,
            return_stats=return_stats,
            inplace_backward=inplace_backward,
            backend=backend,
        )
        return selected_results(results, *entries)
    token_ids = check_logits(op, logits, token_ids)
    options = row_options(op, token_ids, logits.shape[-1], *given, group, compute_dtype(logits))
    shape = token_ids.shape
    log_probs, entropy, row_stats = checked_log_probs(
        logits, token_ids, options, return_stats, inplace_backward, backend
    )
    outputs = (in_shape(log_probs, shape), in_shape(entropy, shape))
    if not return_stats:
        return outputs
    factor = logit_scale if softcap is None else 1.0
    row_max, log_sum, squares = (x.reshape(shape) for x in row_stats.unbind(1))
    max_logit = row_max * factor
    return *outputs, RowStats(max_logit / temperature + log_sum, max_logit, squares)


def checked_log_probs(
    logits: Tensor,
    token_ids: Tensor,
    options: RowOptions,
    want_squares: bool,
    inplace_backward: bool,
    backend: str | None,
) -> tuple[Tensor, ...]:
    """Return the results of `rows_forward` for arguments that were checked.

    Log-probs and entropy are differentiable.
    """
    backend = backend_for(logits, backend)
    if logits.dim() != 2:
        logits = logits.reshape(token_ids.numel(), logits.shape[-1])
        token_ids = token_ids.flatten()
    results: tuple[Tensor, ...] = _forward_op(
        logits, token_ids, options, want_squares, inplace_backward, backend
    )
    return results


def token_entropy(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    row_mask: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute the entropy of every row of `logits`, without labels.

    Args:
        logits: [..., V].
        row_mask: [...] bool or 0/1; rows with 0 are not read, their entropy and gradient are 0.
        temperature and the others: as in `token_log_probs`.

    Returns:
        [...] float32, differentiable with respect to `logits`.

    Raises:
        ValueError: as `token_log_probs`.

    Examples:
        >>> round(token_entropy(torch.zeros(1, 4)).item(), 4)
        1.3863
    """
    op = "token_entropy"
    check.same_device(op, logits=logits, row_mask=row_mask)
    if logits.dim() == 0:
        raise ValueError(f"{op}: logits has shape []; expected [..., V].")
    ids = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    if row_mask is not None:
        check.shape(op, "row_mask", row_mask, "...", {"...": (tuple(ids.shape), "logits")})
        ids = ids.masked_fill(~check.mask(op, "row_mask", row_mask), -100)
    return token_log_probs(
        logits,
        ids,
        temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        vocab_mask=vocab_mask,
        group=group,
        inplace_backward=inplace_backward,
        backend=backend,
    )[1]


def check_logits(
    op: str, logits: Tensor, token_ids: Tensor, shape: str = "...", name: str = "token_ids"
) -> Tensor:
    """Check that logits are [..., V] and token_ids of this shape; return token_ids as int64."""
    # The checks that explain the error take five times as long as these comparisons.
    if (
        not (isinstance(logits, Tensor) and isinstance(token_ids, Tensor))
        or logits.device != token_ids.device
        or logits.dim() == 0
        or logits.shape[:-1] != token_ids.shape
    ):
        check.same_device(op, **{"logits": logits, name: token_ids})
        sizes: check.Sizes = {}
        check.shape(op, "logits", logits, "... V", sizes)
        check.shape(op, name, token_ids, shape, sizes)
    check.dtype(op, "logits", logits)
    return check.ids(op, name, token_ids)


@custom_op("hybridengine::token_log_probs", mutates_args=())
def _forward_op(
    logits: Tensor,
    token_ids: Tensor,
    options: RowOptions,
    want_squares: bool,
    inplace_backward: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `rows_forward`."""
    return rows_forward(logits, token_ids, options, want_squares, backend)


@_forward_op.register_fake
def _(logits: Tensor, want_squares: bool) -> tuple[Tensor, ...]:
    rows, dtype = logits.shape[0], compute_dtype(logits)
    vectors = [logits.new_empty(rows, dtype=dtype) for _ in range(2)]
    return *vectors, logits.new_empty(rows, 3 if want_squares else 2, dtype=dtype)


@custom_op("hybridengine::token_log_probs_backward", mutates_args=())
def _backward_op(
    logits: Tensor,
    token_ids: Tensor,
    options: RowOptions,
    row_results: list[Tensor],
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    backend: str,
) -> Tensor:
    """The gradient of the logits."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    gradients = grad_log_probs, grad_entropy
    rows_backward(logits, out, token_ids, options, row_results, *gradients, backend)
    return out


@_backward_op.register_fake
def _(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    logits, token_ids, options, _, ctx.inplace, ctx.backend = inputs
    options.save(ctx, logits, token_ids, *output)


@check.differentiable_once("token_log_probs")
def _backward(
    ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, ...]:
    if not ctx.needs_input_grad[0] or (grad_log_probs is None and grad_entropy is None):
        return ()
    options, (logits, token_ids, *results) = RowOptions.restore(ctx)
    arguments = (results, grad_log_probs, grad_entropy, ctx.backend)
    # A compiled graph must not overwrite a tensor that its forward saved. While it is traced the
    # logits are fake tensors (torch 2.11 does not set is_compiling here).
    if (
        ctx.inplace
        and not (torch.compiler.is_compiling() or is_fake(logits))
        and _rows_are_separate(logits)
    ):
        logits = logits.detach()
        rows_backward(logits, logits, token_ids, options, *arguments)
        torch.autograd.graph.increment_version(logits)
        return (logits,)
    return (_backward_op(logits, token_ids, options, *arguments),)


def _rows_are_separate(logits: Tensor) -> bool:
    """Return whether rows are contiguous and do not overlap (those of expanded tensors do)."""
    rows, vocab = logits.shape
    return (vocab <= 1 or logits.stride(1) == 1) and (rows <= 1 or logits.stride(0) >= vocab)


_forward_op.register_autograd(_backward, setup_context=_setup_context, num_differentiable=2)
