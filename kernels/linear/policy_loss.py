"""linear_policy_loss: the policy loss from hidden states.

Its gradients are computed in the forward, in one pass (policy_gradient.py): three matrix products
(6 T H V operations) for forward and backward together, where log-probs followed by the loss need
four. The latter is the specification.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, register_backends
from .._per_token import row_index, token_arguments
from ..logprob.op import token_log_probs
from ..logprob.options import row_options
from ..policy_loss.arguments import check_centered_mode
from ..policy_loss.centering import RolloutSupport
from ..policy_loss.centering import score_centering as token_scores
from ..policy_loss.op import DEFAULTS, policy_loss
from ..policy_loss.terms import MODE_ALIASES, SEQUENCE_MODES
from .arguments import check_active_rows, check_budget, check_linear
from .centering import check_support, importance_options
from .logprob import linear_token_log_probs
from .policy_gradient import PolicyInputs, Results, one_pass_loss, waits_for_all_rows
from .reference import reference_logits
from .shared_rows import own_rows

register_backends(
    "linear_policy_loss", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference")
)


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    response_mask: Tensor | None = None,
    entropy_coeff: float = 0.0,
    score_centering: RolloutSupport | None = None,
    hidden_index: Tensor | None = None,
    active_rows: Tensor | None = None,
    grad_scale: float = 1.0,
    budget_bytes: int | None = None,
    deterministic: bool = False,
    main_grad: Tensor | None = None,
    backend: str | None = None,
    **loss_arguments: Any,
) -> Results:
    """Compute the policy loss from hidden states.

    Args:
        hidden: [T, H], packed tokens, or [B, L, H], whose rows are the sequences; every [T] below
            is [B, L] then. weight: [V, H] of the same dtype; token_ids: [T] int32 or int64.
        old_log_probs: [T], constants; None: those of this call, so that every ratio is 1.
        advantages: [T], constants.
        temperature, bias, logit_scale, softcap, vocab_mask, group, budget_bytes, deterministic: as
            in `linear_token_log_probs`.
        response_mask: [T] bool, or 0 and 1; None: all tokens. Masked tokens enter the first matrix
            product only; their log_probs and entropy are 0.
        ignore_index: tokens with this label (`pack(shifted=)` gives it to the last token of a
            sequence) are masked, too: they are not in the loss, its token counts or its gradients.
        entropy_coeff: subtract entropy_coeff * entropy, with gradient.
        score_centering: log-probs of the rollout engine at the likely entries of every token, over
            the full vocabulary (or over what vocab_mask keeps): centers the score, as the operator
            `score_centering` computes it, without [T, V]. Its importance weights are those of
            rollout_log_probs; rollout_is_weights are refused, and so are modes by sequence. On a
            GPU cu_kept may be on the CPU, which saves work; ids there are not checked.
        hidden_index: [T], the row of hidden [D, H] that each token is predicted from, as in
            `linear_token_log_probs`. With score_centering rows are not shared.
        active_rows: [A] int32 or int64, ascending: the only tokens (of all T) whose gradient may be
            nonzero; that of the others is taken as 0, and they are left out of the gradient
            products. None: on a CPU these are found in the call; on a GPU all tokens, because the
            host would have to wait for their number.
        grad_scale: the incoming gradient that the gradients are computed for; the backward rescales
            them if it is another one. Give the factor by which the loss will be multiplied: small
            gradients would underflow in float16 otherwise, and the rescaling takes time.
        loss_arguments: the other arguments of `policy_loss` (loss_mode, clip ratios,
            loss_agg_mode, cu_seqlens, global denominators, ref_log_probs and the KL,
            rollout_is_weights or rollout_log_probs, ...).
        main_grad: [V, H] float32; the backward adds the weight gradient to it and leaves
            weight.grad None.
        backend: `cpp`, `cuda`, `triton` or `reference`; None: the best one.

    Returns:
        (loss, log_probs [T], entropy [T], metrics): loss is differentiable with respect to hidden,
        weight and bias, once and in reverse mode; the others have no gradient. The metrics are
        those of `policy_loss`, tensors on the device; nothing waits for a GPU. For gspo, gmpo and
        seq_sapo, where the gradient of a token depends on its whole sequence, this is
        `linear_token_log_probs` followed by `policy_loss` (8 T H V operations), unless the 16-bit
        gradients of all tokens fit a GPU's budget (docs/operators.md).

    Examples:
        >>> hidden = torch.zeros(2, 8, requires_grad=True)
        >>> weight, ids = torch.ones(4, 8), torch.tensor([1, 3])
        >>> old = torch.full((2,), -1.3862944)
        >>> loss, *_ = linear_policy_loss(
        ...     hidden, weight, ids, old_log_probs=old, advantages=torch.tensor([1.0, 2.0])
        ... )
        >>> round(loss.item(), 4)
        -1.5
    """
    op = "linear_policy_loss"
    unknown = loss_arguments.keys() - DEFAULTS.keys() | loss_arguments.keys() & {"entropy"}
    if unknown:
        raise TypeError(f"{op}: {min(unknown)} is not an argument; expected those of policy_loss.")
    token_ids = check_linear(
        op, hidden, weight, token_ids, bias, main_grad, hidden_index=hidden_index
    )
    backend = choose_backend(op, hidden.device, backend, hidden.dtype)
    if active_rows is not None:
        active_rows = check_active_rows(op, active_rows, token_ids)
    loss_arguments |= {
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "entropy_coeff": entropy_coeff,
    }
    token_ids, loss_arguments = _packed_arguments(
        op, token_ids, ignore_index, response_mask, loss_arguments
    )
    head = {
        "bias": bias,
        "main_grad": main_grad,
        "budget_bytes": check_budget(op, hidden, budget_bytes),
        "deterministic": deterministic,
    }
    grad_scale = check.number(op, "grad_scale", grad_scale, above=0)
    row_arguments: dict[str, Any] = {
        "temperature": temperature,
        "logit_scale": logit_scale,
        "softcap": softcap,
        "ignore_index": ignore_index,
        "vocab_mask": vocab_mask,
        "group": group,
    }
    mode = loss_arguments.get("loss_mode", "ppo_clip")
    mode = MODE_ALIASES.get(mode, mode)
    two_steps = backend == "reference"
    if score_centering is not None:
        check_centered_mode(op, mode)
        importance_options(op, loss_arguments)
    if mode in SEQUENCE_MODES and not two_steps:
        rows = (token_ids if active_rows is None else active_rows).numel()
        two_steps = not waits_for_all_rows(hidden, weight, head, group, entropy_coeff, rows)
    checked = row_arguments | {"group": None} if two_steps else row_arguments
    options = row_options(op, token_ids, weight.shape[0], **checked)
    if score_centering is not None:
        score_centering = check_support(op, score_centering, token_ids, options, weight.shape[0])
    sharable = backend == "cpp" and score_centering is None
    hidden, hidden_index = own_rows(op, hidden, hidden_index, options, sharable)
    inputs = PolicyInputs(hidden, weight, token_ids, active_rows, score_centering, hidden_index)
    if two_steps:
        return _two_step_loss(inputs, head, row_arguments, loss_arguments, backend)
    return one_pass_loss(inputs, head, options, loss_arguments, grad_scale, backend)


def _packed_arguments(
    op: str, token_ids: Tensor, ignore_index: int, response_mask: Tensor | None, arguments: dict
) -> tuple[Tensor, dict]:
    """Check the loss's arguments per token, and return them as [T] with response_mask.

    Returns also the token_ids, ignore_index where they are masked: labels of it are masked, too.
    """
    names = ("advantages", "old_log_probs", "ref_log_probs", "rollout_is_weights")
    advantages = arguments["advantages"]
    check.same_device(op, token_ids=token_ids, advantages=advantages, response_mask=response_mask)
    check.integer(op, "ignore_index", ignore_index)
    sizes: check.Sizes = {"...": (tuple(token_ids.shape), "token_ids")}
    check.shape(op, "advantages", advantages, "...", sizes)
    if response_mask is not None:
        check.shape(op, "response_mask", response_mask, "...", sizes)
        mask = check.mask(op, "response_mask", response_mask)
        token_ids = token_ids.masked_fill(~mask, ignore_index)
    floats = {name: arguments.get(name) for name in (*names, "rollout_log_probs")}
    masks = {"response_mask": token_ids != ignore_index, "selected": arguments.get("selected")}
    tokens, cu_seqlens = token_arguments(op, floats, masks, arguments.get("cu_seqlens"))
    return token_ids, arguments | tokens | {"cu_seqlens": cu_seqlens}


def _two_step_loss(
    inputs: PolicyInputs,
    head: dict[str, Any],
    row_arguments: dict,
    loss_arguments: dict,
    backend: str,
) -> Results:
    """Compute log-probs, then the loss: the specification, and a form of sequence-level modes."""
    hidden, weight, token_ids, active_rows, support, hidden_index = inputs
    bias = head["bias"]
    if backend == "reference" and head["main_grad"] is None and not head["deterministic"]:
        masked = token_ids == row_arguments["ignore_index"]
        logits = reference_logits(hidden, weight, bias, masked)
        log_probs, entropy = token_log_probs(logits, token_ids, backend=backend, **row_arguments)
    else:
        log_probs, entropy = linear_token_log_probs(
            hidden,
            weight,
            token_ids,
            hidden_index=hidden_index,
            backend=backend,
            **head,
            **row_arguments,
        )
    if active_rows is not None:
        inactive = torch.ones_like(token_ids, dtype=torch.bool)
        inactive.view(-1)[active_rows] = False
        log_probs, entropy = (
            torch.where(inactive, result.detach(), result) for result in (log_probs, entropy)
        )
    centering = None
    if support is not None:
        centering = _reference_centering(inputs, head, row_arguments, loss_arguments, backend)
        if active_rows is not None:
            centering = torch.where(inactive.flatten(), centering.detach(), centering)
    loss, metrics = policy_loss(
        log_probs.flatten(),
        entropy=entropy.flatten(),
        score_centering=centering,
        backend=backend,
        **loss_arguments,
    )
    return loss, log_probs.detach(), entropy.detach(), metrics


def _reference_centering(
    inputs: PolicyInputs,
    head: dict[str, Any],
    row_arguments: dict,
    loss_arguments: dict,
    backend: str,
) -> Tensor:
    """Compute C, [T], from a row of logits for every recorded entry: the specification."""
    assert inputs.support is not None
    ids, ends, rollout_log_probs = inputs.support
    mask, ends = loss_arguments["response_mask"], ends.to(ids.device)
    rows = row_index(ends, ids.shape[0])
    options = dict(row_arguments)
    if isinstance(options["temperature"], Tensor):
        options["temperature"] = options["temperature"].flatten()[rows]
    if options["vocab_mask"] is not None:
        options["vocab_mask"] = options["vocab_mask"].flatten(0, -2)[rows]
    ids = torch.where(mask[rows], ids, options["ignore_index"])
    hidden = inputs.hidden.flatten(0, -2)[rows]
    log_probs, _ = linear_token_log_probs(
        hidden, inputs.weight, ids, backend=backend, **head, **options
    )
    weights = importance_options("linear_policy_loss", loss_arguments)
    return token_scores(log_probs, rollout_log_probs, ends, response_mask=mask, **weights)
