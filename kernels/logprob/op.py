"""token_log_probs: log-probability and entropy of every token, from logits, in one pass.

With x the logits of a row, y = softcap * tanh(logit_scale * x / softcap) (logit_scale * x without
a soft-cap), z = y / temperature and p = softmax(z):

    log_prob = log p[token]      entropy = -sum_v p[v] log p[v]
    d loss / d z[v] = p[v] * (-(g + h * entropy) - h * log p[v])  +  g * [v == token]

with g, h the gradients of log_prob and entropy. Forward is one read of the logits; backward one
read and one write. Only [T] float32 vectors are saved beside the logits. A row is reduced in a
fixed order by itself: results do not depend on other rows, on the split of the batch or on the
number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from .. import _check as check
from .._backend import choose_backend, native, register_backends
from .reference import reference_backward, reference_forward
from .row_options import RowOptions, in_shape, row_options
from .vocab_parallel import merge_partials

register_backends("token_log_probs", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference"))

_label_flags: dict[torch.device, Tensor] = {}


class RowStats(NamedTuple):
    """Further outputs per row, [T] float32, without gradient."""

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
    keep_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    return_stats: bool = False,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Log-probability of `token_ids` and entropy of the distribution, per row of `logits`.

    Args:
        logits: [..., V] float32, bfloat16 or float16; float64 takes the reference.
        token_ids: [...] int32 or int64.
        temperature: a number, or a tensor [...]; above 0.
        logit_scale: multiplies the logits first; above 0.
        softcap: y = softcap * tanh(logit_scale * x / softcap); None for none.
        ignore_index: rows with this label are not read: outputs and gradients are 0 there.
        keep_mask: [..., V] bool, or 0 and 1; False removes an entry from the distribution
            (top-k/top-p replay).
        group: every rank holds a slice of the vocabulary, [..., V_r], in rank order and of any
            size (as torch.chunk and DTensor cut; empty ones too). The ranks exchange their sizes
            and one [T, 5] message forward, nothing backward, and do not wait for a GPU.
        return_stats: also return a `RowStats`.
        inplace_backward: write the gradient over `logits`. Their version counter moves, so that
            autograd refuses to use them afterwards.
        backend: `cpp`, `cuda`, `triton` or `reference`; None takes the best one.

    Returns:
        log_probs [T] and entropy [T], float32 whatever the type of the logits, both
        differentiable in `logits`, once and in reverse mode. An entry with logit -inf is removed
        like a masked one, and such a token gets -inf; a soft-cap makes infinite logits finite
        (-softcap and softcap) first. A row with NaN or +inf, or with nothing left, gives NaN.

    Raises:
        IndexError: a label outside [0, V) other than ignore_index. On a CUDA device, where
            checking would synchronise, such a row gives NaN and `check_labels` raises.
        ValueError: wrong shapes, dtypes, devices, temperature (on a CUDA device a temperature of a
            token that is not above 0 makes its row NaN), scale or soft-cap.
        RuntimeError, NotImplementedError: a second derivative, or a forward-mode one.

    Source: online softmax, Milakov & Gimelshein, arXiv 1805.02867.

    Example:
        >>> log_probs, entropy = token_log_probs(torch.zeros(1, 4), torch.tensor([2]))
        >>> round(log_probs.item(), 4), round(entropy.item(), 4)
        (-1.3863, 1.3863)
    """
    op = "token_log_probs"
    token_ids = check_logits(op, logits, token_ids)
    options = row_options(
        op, token_ids, logits.shape[-1], temperature, logit_scale, softcap, ignore_index, keep_mask,
        group,
    )  # fmt: skip
    shape = token_ids.shape
    flat = logits if logits.dim() == 2 else logits.flatten(0, -2)
    log_probs, entropy, row_max, log_sum, squares = torch.ops.hybridengine.token_log_probs(
        flat, token_ids.flatten(), *options, return_stats, inplace_backward, backend
    )
    outputs = (in_shape(log_probs, shape), in_shape(entropy, shape))
    if not return_stats:
        return outputs
    factor = logit_scale if softcap is None else 1.0
    max_logit = (row_max * factor).detach().view(shape)
    lse = max_logit / temperature + log_sum.detach().view(shape)
    return *outputs, RowStats(lse, max_logit, squares.detach().view(shape))


def check_logits(op: str, logits: Tensor, token_ids: Tensor) -> Tensor:
    """token_ids as int64, after checking that [..., V] and [...] fit."""
    check.same_device(op, logits=logits, token_ids=token_ids)
    check.no_forward_ad(op, logits=logits)
    sizes: check.Sizes = {}
    check.shape(op, "logits", logits, "... V", sizes)
    check.shape(op, "token_ids", token_ids, "...", sizes)
    check.floats(op, logits=logits)
    return check.ids(op, "token_ids", token_ids)


def check_labels(device: torch.device | str = "cuda") -> None:
    """Raise IndexError if any label on `device` was out of range since the last call.

    Synchronises, so call it where the loop waits for the device anyway.
    """
    flag = _label_flags.get(torch.device(device))
    if flag is not None and flag.item():
        flag.zero_()
        raise IndexError(
            f"token_log_probs: a label on {device} was outside the vocabulary; "
            "the log-probs of its row are NaN."
        )


def _label_flag(device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return None  # checked before anything is computed
    if device not in _label_flags:
        _label_flags[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return _label_flags[device]


def _backend_for(logits: Tensor, requested: str | None) -> str:
    if logits.dtype == torch.float64:
        return choose_backend("token_log_probs", logits.device, requested or "reference")
    return choose_backend("token_log_probs", logits.device, requested)


def rows_forward(
    logits: Tensor, token_ids: Tensor, options: RowOptions, want_squares: bool, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """log_probs, entropy, row_max, log_sum, sum_p_squared, without autograd."""
    backend = _backend_for(logits, backend)
    if backend == "reference":
        with torch.no_grad():
            return reference_forward(logits, token_ids, options, want_squares)
    logits, flag = _inner_contiguous(logits), _label_flag(logits.device)
    parallel = options.group != ""
    if backend == "triton":
        from . import triton as logprob_triton

        found = logprob_triton.forward(logits, token_ids, options, want_squares, flag)
    elif parallel:
        found = [native().log_prob_partial(logits, token_ids, options.native(), flag)]
    else:
        found = native().log_prob_forward(logits, token_ids, options.native(), want_squares, flag)
    if not parallel:
        return tuple(found)
    ignored = token_ids == options.ignore_index
    return merge_partials(found[0], options.factor, options.group, ignored, want_squares)


def rows_backward(
    logits: Tensor,
    out: Tensor,
    token_ids: Tensor,
    options: RowOptions,
    row_results: list[Tensor],
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    backend: str | None,
    places: Tensor | None = None,
) -> None:
    """Write the gradient of the logits into `out`: `logits` itself, one that looks like it, or a
    16-bit one beside float32 logits. With `places` ([T] int32) into these rows of `out`, nowhere
    where it is -1; not by the reference."""
    backend = _backend_for(logits, backend)
    if backend == "reference":
        out.copy_(reference_backward(logits, token_ids, options, grad_log_probs, grad_entropy))
        return
    gradients = [
        None if grad is None else grad.float().contiguous()
        for grad in (grad_log_probs, grad_entropy)
    ]
    logits = _inner_contiguous(logits)
    if backend == "triton":
        from . import triton as logprob_triton

        logprob_triton.backward(
            logits, out, token_ids, options, list(row_results), *gradients, places
        )
    else:
        native().log_prob_backward(
            logits, token_ids, options.native(), row_results, *gradients, out, places
        )


def _rows_are_apart(logits: Tensor) -> bool:
    """Whether the rows are contiguous and do not overlap, as those of expanded tensors do."""
    rows, vocab = logits.shape
    return (vocab <= 1 or logits.stride(1) == 1) and (rows <= 1 or logits.stride(0) >= vocab)


def _inner_contiguous(logits: Tensor) -> Tensor:
    return logits if logits.shape[1] <= 1 or logits.stride(1) == 1 else logits.contiguous()


@torch.library.custom_op("hybridengine::token_log_probs", mutates_args=())
def _token_log_probs(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    keep_mask: Tensor | None,
    vocab_range: Tensor | None,
    group: str,
    want_squares: bool,
    inplace_backward: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = RowOptions(
        temperature, temperatures, logit_scale, softcap, ignore_index, keep_mask, vocab_range, group
    )
    return rows_forward(logits, token_ids, options, want_squares, backend)


@_token_log_probs.register_fake
def _(logits, *arguments):
    rows, want_squares = logits.shape[0], arguments[-3]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    vectors = [logits.new_empty(rows, dtype=dtype) for _ in range(4)]
    return *vectors, logits.new_empty(rows if want_squares else 0, dtype=dtype)


def _setup_context(ctx, inputs, output):
    logits, token_ids, *options = inputs
    options = RowOptions(*options[:-3])
    ctx.save_for_backward(logits, token_ids, *options.tensors(), *output[:4])
    ctx.scalars = options.scalars()
    ctx.inplace, ctx.backend = inputs[-2], inputs[-1]
    ctx.set_materialize_grads(False)


@check.differentiable_once("token_log_probs")
def _backward(ctx, grad_log_probs, grad_entropy, *_):
    nothing = (None,) * 12
    if not ctx.needs_input_grad[0] or (grad_log_probs is None and grad_entropy is None):
        return None, *nothing
    logits, token_ids, *tensors = ctx.saved_tensors
    options, row_results = RowOptions.of(ctx.scalars, tensors[:3]), tensors[3:]
    rest = (row_results, grad_log_probs, grad_entropy, ctx.backend)
    # A compiled graph may not write over a tensor that its forward half saved. While it is traced
    # (torch 2.11 does not say so here) the logits are a tensor without memory.
    tracing = torch.compiler.is_compiling() or is_fake(logits)
    if ctx.inplace and not tracing and _rows_are_apart(logits):
        logits = logits.detach()
        rows_backward(logits, logits, token_ids, options, *rest)
        torch.autograd.graph.increment_version(logits)
        return logits, *nothing
    gradient = torch.ops.hybridengine.token_log_probs_backward(logits, token_ids, *options, *rest)
    return gradient, *nothing


@torch.library.custom_op("hybridengine::token_log_probs_backward", mutates_args=())
def _token_log_probs_backward(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    keep_mask: Tensor | None,
    vocab_range: Tensor | None,
    group: str,
    row_results: list[Tensor],
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    backend: str | None,
) -> Tensor:
    grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    options = RowOptions(
        temperature, temperatures, logit_scale, softcap, ignore_index, keep_mask, vocab_range, group
    )
    rows_backward(
        logits, grad_logits, token_ids, options, row_results, grad_log_probs, grad_entropy, backend
    )
    return grad_logits


@_token_log_probs_backward.register_fake
def _(logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


torch.library.register_autograd(
    "hybridengine::token_log_probs", _backward, setup_context=_setup_context
)
