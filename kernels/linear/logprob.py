"""linear_token_log_probs: log-probs and entropy from hidden states, without [T, V] logits.

logits = hidden @ weight.T + bias is computed for a chunk of rows at a time, as many as fit the
budget in bytes, reduced by the row kernel of token_log_probs, and dropped. Logits are float32, also
for 16-bit hidden and weight: they are never rounded. The backward computes each chunk again,
replaces it by its gradient and multiplies twice: 2 T H V operations forward and 6 T H V backward (2
of them for the recomputation). On a CPU rows with zero gradient are left out of the backward; where
all logits fit the budget they are kept for it. docs/operators.md derives the counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, register_backends
from .._library import custom_op
from .._per_token import compute_dtype
from ..gemm import mixed_gemm
from ..logprob.options import RowOptions, in_shape, row_options
from ..logprob.rows import rows_forward
from ..memory_pool import empty_from_pool
from .arguments import (
    check_budget,
    check_linear,
    register_linear_autograd,
)
from .chunks import Chunks, logits_fit
from .gradients import LogProbGradients, any_nonzero
from .shared_rows import RowTokens, own_rows

_OP = "linear_token_log_probs"

register_backends(_OP, cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference"))


class LinearStats(NamedTuple):
    """Further results per row, without gradient."""

    argmax: Tensor  # int64: the entry with the largest logit
    sum_p_squared: Tensor  # float32


def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    hidden_index: Tensor | None = None,
    budget_bytes: int | None = None,
    deterministic: bool = False,
    main_grad: Tensor | None = None,
    return_stats: bool = False,
    backend: str | None = None,
) -> tuple[Any, ...]:
    """Compute the log-probability of `token_ids` and the entropy from hidden states.

    Args:
        hidden: [..., H]; weight: [V, H] of the same dtype; token_ids: [...] int32 or int64.
        temperature, logit_scale, softcap, ignore_index, vocab_mask: as in `token_log_probs`.
        bias: [V] or None.
        group: vocabulary-parallel ranks. Every rank has a slice of the vocabulary, weight [V_r, H],
            in rank order and of any size, and the same hidden. The gradient of hidden is summed
            over the ranks.
        hidden_index: [...] int32 or int64, the row of hidden [D, H] that each token is predicted
            from, where responses with a common prefix share rows; None: hidden is [..., H]. On a
            CPU the logits of a row and their products are computed once for all of its tokens, if
            temperature is a number and neither vocab_mask nor group is given. Bits of results are
            those of hidden[hidden_index] where the product's rows do not depend on each other.
        budget_bytes: memory for logits and temporaries, besides inputs, outputs and gradients;
            None: 256 MiB on a CPU, 5% of a GPU's memory up to 4 GiB. Ignored with a group: a chunk
            is 512 rows. If
            8 T V bytes (and some more per row) fit, the logits are kept until the backward, which
            then does not compute them again; not in the deterministic mode or with a group.
        deterministic: use matrix products of one fixed shape, so that a row's log-prob, entropy
            and hidden gradient do not depend on the other rows or on the budget, and the weight
            gradient is the same in every run.
        main_grad: [V, H] float32, contiguous; the weight gradient is added to it and weight.grad
            stays None.
        return_stats: also return a `LinearStats` of tensors [...]; not with a group.
        backend: the backend of the row kernel; None: the best one.

    Returns:
        log_probs [...] and entropy [...], float32, differentiable with respect to hidden, weight
        and bias, once and in reverse mode. Logits and the sums of the weight gradient are float32.
        The gradient of the logits is rounded to the inputs' dtype for its two products where the
        machine has fast products of that dtype. Gradients that are not needed are not computed.

    Raises:
        ValueError: a wrong shape, dtype or device. Otherwise as `token_log_probs`.

    Examples:
        >>> hidden, weight = torch.zeros(2, 8), torch.randn(4, 8)
        >>> log_probs, _ = linear_token_log_probs(hidden, weight, torch.tensor([0, 3]))
        >>> [round(value, 4) for value in log_probs.tolist()]
        [-1.3863, -1.3863]
    """
    op = _OP
    token_ids = check_linear(
        op, hidden, weight, token_ids, bias, main_grad, hidden_index=hidden_index
    )
    options = row_options(
        op,
        token_ids,
        weight.shape[0],
        temperature,
        logit_scale,
        softcap,
        ignore_index,
        vocab_mask,
        group,
        compute_dtype(hidden),
    )
    budget_bytes = check_budget(op, hidden, budget_bytes)
    if return_stats and group is not None:
        raise ValueError(
            f"{op}: return_stats is given with a group, whose ranks hold slices of the vocabulary; "
            "call without return_stats."
        )
    backend = choose_backend(op, hidden.device, backend, hidden.dtype)
    hidden, hidden_index = own_rows(op, hidden, hidden_index, options, backend == "cpp")
    flat = hidden if hidden.dim() == 2 else hidden.flatten(0, -2)
    keep_logits = keeps_logits((flat, weight, bias), options, budget_bytes, deterministic)
    results = _forward_op(
        flat,
        weight,
        bias,
        token_ids.flatten(),
        options,
        budget_bytes,
        deterministic,
        main_grad,
        backend,
        keep_logits,
        return_stats,
        None if hidden_index is None else hidden_index.flatten(),
    )
    shape = token_ids.shape
    outputs = in_shape(results[0], shape), in_shape(results[1], shape)
    if not return_stats:
        return outputs
    _, _, row_stats, _, argmax = results
    return *outputs, LinearStats(argmax.view(shape), row_stats[:, 2].reshape(shape))


def keeps_logits(
    tensors: Sequence[Tensor | None], options: RowOptions, budget_bytes: int, deterministic: bool
) -> bool:
    """Return whether the forward saves the logits for the backward of hidden, weight and bias."""
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    hidden, weight, _ = tensors
    assert hidden is not None and weight is not None
    if not wanted or deterministic or options.group:  # these have chunks of a fixed size
        return False
    return logits_fit(hidden, weight, budget_bytes)


@custom_op("hybridengine::linear_token_log_probs", mutates_args=())
def _forward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    options: RowOptions,
    budget_bytes: int,
    deterministic: bool,
    main_grad: Tensor | None,
    backend: str,
    keep_logits: bool,
    want_stats: bool,
    hidden_index: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of `rows_forward`, the logits, and the argmax.

    The logits are empty if not kept, the argmax if no stats are wanted.
    """
    shared = RowTokens.of(_OP, hidden_index, hidden.shape[0])
    results = _empty_results(hidden, weight, token_ids, False, want_stats)
    if keep_logits:
        shape = hidden.shape[0], weight.shape[0]
        logits = empty_from_pool(shape, compute_dtype(hidden), hidden.device)
        mixed_gemm(logits, hidden, weight, bias)
        if shared is None:
            of_rows = rows_forward(logits, token_ids, options, want_stats, backend)
            return *of_rows, logits, _argmax(logits, options) if want_stats else results[4]
        results = *results[:3], logits, results[4]
        parts: Iterable = [(slice(0, shape[0]), logits)]
    else:
        chunks = Chunks(hidden, weight, bias, budget_bytes, deterministic, 0, options.group)
        parts = ((rows, chunks.logits(rows)) for rows in chunks.parts())
    for rows, logits in parts:
        index, cu_tokens = (rows, None) if shared is None else shared.take(rows)[0]
        ids, selected = token_ids[index], options.select(index)
        of_tokens = rows_forward(logits, ids, selected, want_stats, backend, cu_tokens)
        for result, value in zip(results[:3], of_tokens, strict=True):
            result[index] = value
        if want_stats:
            argmax = _argmax(logits, selected)
            if cu_tokens is not None:
                argmax = argmax.repeat_interleave(cu_tokens.diff())
            results[4][index] = argmax
    return results


@_forward_op.register_fake
def _empty_results(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, keep_logits: bool, want_stats: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, dtype = token_ids.shape[0], compute_dtype(hidden)
    sizes = (tokens,), (tokens,), (tokens, 3 if want_stats else 2)
    log_probs, entropy, row_stats = (hidden.new_empty(size, dtype=dtype) for size in sizes)
    shape = (hidden.shape[0], weight.shape[0]) if keep_logits else (0, 0)
    logits = hidden.new_empty(shape, dtype=dtype)
    argmax = hidden.new_empty(tokens if want_stats else 0, dtype=torch.int64)
    return log_probs, entropy, row_stats, logits, argmax


def _argmax(logits: Tensor, options: RowOptions) -> Tensor:
    """Return the largest entry of every row: the soft-cap and the scales keep the order."""
    if options.vocab_mask is not None:
        logits = logits.masked_fill(~options.vocab_mask, -torch.inf)
    return logits.argmax(-1)


@custom_op("hybridengine::linear_token_log_probs_backward", mutates_args=("main_grad",))
def _backward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    options: RowOptions,
    budget_bytes: int,
    deterministic: bool,
    main_grad: Tensor | None,
    backend: str,
    keep_logits: bool,
    want_stats: bool,
    hidden_index: Tensor | None,
    row_results: list[Tensor],
    logits: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias; those not `wanted` are empty.

    On a CPU the logits of rows with zero gradient are not computed again, nor their products.
    """
    rows = hidden.shape[0]
    shared = RowTokens.of(_OP, hidden_index, rows)
    ignored = token_ids == options.ignore_index
    gradients = [
        None if grad is None else grad.masked_fill(ignored, 0)
        for grad in (grad_log_probs, grad_entropy)
    ]
    chunks = Chunks(
        hidden, weight, bias, budget_bytes, deterministic, rows, options.group, keep_logits
    )
    active = any_nonzero(*gradients)
    active = active if shared is None else shared.any(active[shared.order])
    grads = LogProbGradients(
        chunks,
        token_ids,
        options,
        backend,
        wanted,
        skip_inactive=keep_logits,
        main_grad=main_grad,
        inactive=~active,
    )
    selects = check.readable(hidden) and not keep_logits and not active.all()
    for part in chunks.parts(active.nonzero().squeeze(1) if selects else None):
        tokens = None if shared is None else shared.take(part)[0]
        index = part if tokens is None else tokens.order
        of_log_probs, of_entropy = (None if x is None else x[index] for x in gradients)
        grads.add_chunk(
            logits if keep_logits else grads.logits(part),
            part,
            [result[index] for result in row_results],
            of_log_probs,
            of_entropy,
            tokens=tokens,
        )
    return grads.finish()


register_linear_autograd(
    _OP,
    (_forward_op, _backward_op),
    from_results=lambda results: [results[:3], results[3]],
)
