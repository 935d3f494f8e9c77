"""linear_token_log_probs: log-probs and entropy from hidden states, without [T, V] logits.

logits = hidden @ weight.T + bias is computed for a chunk of rows at a time, as many as fit the
budget in bytes, reduced by the row kernel of token_log_probs, and dropped. Logits are float32, also
for 16-bit hidden and weight: they are never rounded. The backward computes each chunk again,
replaces it by its gradient and multiplies twice: 2 T H V operations forward and 6 T H V backward (2
of them for the recomputation). docs/linear_policy_loss.md derives the counts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._backend import register_backends
from .._per_token import compute_dtype
from ..logprob.options import in_shape, row_options
from ..logprob.rows import rows_forward
from .arguments import (
    LINEAR_SCHEMA,
    check_budget,
    check_linear,
    register_linear_autograd,
    split_row_options,
)
from .chunks import Chunks, LinearGradients

register_backends(
    "linear_token_log_probs", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference")
)


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
    budget_bytes: int | None = None,
    deterministic: bool = False,
    main_grad: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of `token_ids` and the entropy from hidden states.

    Args:
        hidden: [..., H]; weight: [V, H] of the same dtype; token_ids: [...] int32 or int64.
        temperature, logit_scale, softcap, ignore_index, vocab_mask: as in `token_log_probs`.
        bias: [V] or None.
        group: vocabulary-parallel ranks. Every rank has a slice of the vocabulary, weight [V_r, H],
            in rank order and of any size, and the same hidden. The gradient of hidden is summed
            over the ranks.
        budget_bytes: memory for logits and temporaries, besides inputs, outputs and gradients;
            None: 256 MiB on a CPU, 1 GiB on a GPU. Ignored with a group: a chunk is 512 rows.
        deterministic: use matrix products of one fixed shape, so that a row's log-prob, entropy
            and hidden gradient do not depend on the other rows or on the budget, and the weight
            gradient is the same in every run.
        main_grad: [V, H] float32, contiguous; the weight gradient is added to it and weight.grad
            stays None.
        backend: of the row kernel; None: the best one.

    Returns:
        log_probs [...] and entropy [...], float32, differentiable with respect to hidden, weight
        and bias, once and in reverse mode. Logits and the sums of the weight gradient are float32.
        The gradient of the logits is rounded to the inputs' dtype for its two products where the
        machine has fast products of that dtype. Gradients that are not needed are not computed.

    Raises:
        ValueError: a wrong shape, dtype or device. Otherwise as `token_log_probs`.

    Example:
        >>> hidden, weight = torch.zeros(2, 8), torch.randn(4, 8)
        >>> log_probs, _ = linear_token_log_probs(hidden, weight, torch.tensor([0, 3]))
        >>> [round(value, 4) for value in log_probs.tolist()]
        [-1.3863, -1.3863]
    """
    op = "linear_token_log_probs"
    token_ids = check_linear(op, hidden, weight, token_ids, bias, main_grad)
    options = row_options(
        op, token_ids, weight.shape[0], temperature, logit_scale, softcap, ignore_index,
        vocab_mask, group,
    )  # fmt: skip
    log_probs, entropy, *_ = torch.ops.hybridengine.linear_token_log_probs(
        hidden if hidden.dim() == 2 else hidden.flatten(0, -2), weight, bias, token_ids.flatten(),
        *options, check_budget(op, hidden, budget_bytes), deterministic, main_grad, backend,
    )  # fmt: skip
    return in_shape(log_probs, token_ids.shape), in_shape(entropy, token_ids.shape)


@torch.library.custom_op(
    "hybridengine::linear_token_log_probs",
    mutates_args=(),
    schema=f"({LINEAR_SCHEMA}, Tensor? main_grad, str? backend) -> ({', '.join(['Tensor'] * 4)})",
)
def _forward_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """The first four results of `rows_forward`, each [T]."""
    options, (budget_bytes, deterministic, _, backend) = split_row_options(arguments)
    chunks = Chunks(hidden, weight, bias, budget_bytes, deterministic, False, group=options.group)
    results = _empty_results(hidden)
    for rows in chunks.slices():
        part = rows_forward(
            chunks.logits(rows), token_ids[rows], options.select(rows), False, backend
        )
        for result, value in zip(results, part, strict=False):
            result[rows] = value
    return results


@_forward_op.register_fake
def _empty_results(hidden: Tensor, *_: Any) -> tuple[Tensor, ...]:
    dtype = compute_dtype(hidden)
    return tuple(hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(4))


@torch.library.custom_op(
    "hybridengine::linear_token_log_probs_backward",
    mutates_args=("main_grad",),
    schema=f"({LINEAR_SCHEMA}, Tensor(a!)? main_grad, str? backend, Tensor[] row_results, "
    "Tensor? grad_log_probs, Tensor? grad_entropy, bool[] wanted) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias; those not `wanted` are empty."""
    options, rest = split_row_options(arguments)
    budget_bytes, deterministic, main_grad, backend, row_results, *gradients, wanted = rest
    chunks = Chunks(hidden, weight, bias, budget_bytes, deterministic, True, group=options.group)
    active = torch.stack([grad != 0 for grad in gradients if grad is not None]).any(0)
    inactive = (token_ids == options.ignore_index) | ~active
    grads = LinearGradients(chunks, token_ids, options, backend, wanted, main_grad, inactive)
    for rows in chunks.slices():
        grads.add_chunk(
            grads.logits(rows),
            rows,
            [result[rows] for result in row_results],
            *(None if grad is None else grad[rows] for grad in gradients),
        )
    return grads.finish()


register_linear_autograd(
    "linear_token_log_probs", main_grad_at=2, from_results=lambda results: [results]
)
