"""Forward and backward of rows of logits by any backend, on [T, V] tensors and without autograd.

`token_log_probs` calls them once, the operators of the linear package once per chunk of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, has_triton, native, register_backends
from .._per_token import unit_inner_stride
from .options import RowOptions
from .reference import reference_backward, reference_forward
from .vocab_parallel import merge_partials

register_backends("token_log_probs", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference"))

# Per CUDA device: [1] int32, set to 1 by the kernels if a label is out of range.
bad_labels: dict[torch.device, Tensor] = {}


def rows_forward(
    logits: Tensor,
    token_ids: Tensor,
    options: RowOptions,
    want_squares: bool,
    backend: str,
    cu_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log_probs [T], entropy [T] and row_stats [T, 2]: row_max and log_sum.

    With `want_squares` row_stats is [T, 3]: sum_p_squared, too. With `options.negate` log_probs are
    the negative ones. backend: of `backend_for`.
    cu_tokens: [D + 1], row d of the logits [D, V] is that of the tokens from cu_tokens[d] to
    cu_tokens[d + 1], for `cpp` without a group; None: a row for each token.
    """
    if backend == "reference":
        with torch.no_grad():
            return reference_forward(logits, token_ids, options, want_squares)
    logits, bad_label = unit_inner_stride(logits), bad_label_flag(logits.device)
    parallel = options.group != ""
    if backend == "triton":
        from . import triton as logprob_triton

        results = logprob_triton.forward(logits, token_ids, options, want_squares, bad_label)
    elif parallel:
        results = [native().log_prob_partial(logits, token_ids, options.native(), bad_label)]
    else:
        cu_tokens = None if cu_tokens is None else cu_tokens.int()
        results = native().log_prob_forward(
            logits, token_ids, options.native(), want_squares, bad_label, cu_tokens
        )
    if not parallel:
        log_probs, entropy, row_stats = results
        return log_probs, entropy, row_stats
    ignored = token_ids == options.ignore_index
    return merge_partials(results[0], options, ignored, want_squares)


def rows_backward(
    logits: Tensor,
    out: Tensor,
    token_ids: Tensor,
    options: RowOptions,
    row_results: list[Tensor],
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    backend: str,
    row_index: Tensor | None = None,
    cu_tokens: Tensor | None = None,
) -> None:
    """Write the gradient of the logits into `out`.

    Args:
        out: [T, V], `logits` itself, a tensor like it, or a 16-bit one for float32 logits.
        row_results: the results of `rows_forward`.
        row_index: [T] int32: the gradient of row t goes to row row_index[t] of `out`, nowhere if
            that is -1. With cu_tokens it is [D].
        cu_tokens: as in `rows_forward`: the gradient of a row is the sum over its tokens.
    """
    if backend == "reference":
        gradient = reference_backward(logits, token_ids, options, grad_log_probs, grad_entropy)
        if row_index is None:
            out.copy_(gradient)
        else:
            selected = row_index >= 0
            out[row_index[selected].long()] = gradient[selected].to(out.dtype)
        return
    grad_log_probs, grad_entropy = (
        None if grad is None else check.as_contiguous(grad, torch.float32)
        for grad in (grad_log_probs, grad_entropy)
    )
    logits, row_results = unit_inner_stride(logits), list(row_results)
    if backend == "triton":
        from . import triton as logprob_triton

        inputs = logprob_triton.inputs_of(logits, token_ids, options)
        gradients = (grad_log_probs, grad_entropy, row_index)
        logprob_triton.backward(inputs, out, row_results, *gradients)
    else:
        native().log_prob_backward(
            logits,
            token_ids,
            options.native(),
            row_results,
            grad_log_probs,
            grad_entropy,
            out,
            row_index,
            None if cu_tokens is None else cu_tokens.int(),
        )


def has_unscaled_gradient(hidden: Tensor, group: str) -> bool:
    """Return whether `rows_unscaled_gradient` runs for the logits of these hidden states.

    On a GPU with Triton, without vocabulary-parallel ranks. bfloat16 only: it has the exponents
    that exponentials below and above the row's maximum need.
    """
    return hidden.is_cuda and hidden.dtype == torch.bfloat16 and has_triton() and not group


def rows_unscaled_gradient(
    logits: Tensor, out: Tensor, token_ids: Tensor, options: RowOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log_probs, entropy and row_scale, each [T], reading the logits once.

    row_scale * out is the gradient of log_probs with respect to the logits: the product with the
    incoming gradients, which depend on log_probs, is left to what reads `out`.

    Args:
        out: [T, V], written; rows of the label ignore_index become 0, and so do their results.
    """
    from .triton_unscaled import unscaled_gradient

    return unscaled_gradient(logits, out, token_ids, options, bad_label_flag(logits.device))


def check_labels(device: torch.device | str = "cuda") -> None:
    """Raise IndexError if a label on `device` was out of range since the last call.

    It synchronizes with the device, so call it where the training loop does so anyway.
    """
    flag = bad_labels.get(torch.device(device))
    if flag is not None and flag.item():
        flag.zero_()
        raise IndexError(
            f"token_log_probs: a label on {device} was outside the vocabulary; "
            "the log-probs of its row are NaN."
        )


def bad_label_flag(device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return None  # the CPU kernels raise
    if device not in bad_labels:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"token_log_probs: the first call on {device} is captured by a CUDA graph, which "
                "would reset its report of bad labels at every replay; call it once before."
            )
        bad_labels[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return bad_labels[device]


def backend_for(values: Tensor, requested: str | None) -> str:
    """Return the backend of the rows of logits, or of those of hidden states."""
    if values.dtype == torch.float64:
        requested = requested or "reference"
    return choose_backend("token_log_probs", values.device, requested)
