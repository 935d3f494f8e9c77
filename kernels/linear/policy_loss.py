"""linear_policy_loss: the policy loss from hidden states, with gradients computed in the forward.

Old log-probs (or that they are the row's own), advantages, mask and the global denominators are
known before the forward. So the gradient of a chunk of logits can be computed right after its rows
are reduced, while it is still in the buffer: three matrix products (6 T H V operations) for forward
and backward together, where the two-step form needs four. Inactive rows, whose gradient is zero
(masked, zero advantage, clipped), are left out of the two gradient products where the host knows
them. docs/operators.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._aggregation import LOSS_AGG_MODES, Counts, scaled_weights
from .._backend import choose_backend, register_backends
from .._library import custom_op
from .._per_token import row_index, token_arguments
from ..logprob.op import token_log_probs
from ..logprob.options import RowOptions, in_shape, row_options
from ..logprob.rows import has_unscaled_gradient, rows_forward, rows_unscaled_gradient
from ..policy_loss.arguments import LossInputs, check_centered_mode, check_inputs
from ..policy_loss.centering import RolloutSupport
from ..policy_loss.centering import score_centering as token_scores
from ..policy_loss.importance import ImportanceBounds
from ..policy_loss.op import (
    DEFAULTS,
    LossCoefficients,
    LossModes,
    evaluate,
    kernel_tensors,
    policy_loss,
    policy_loss_op,
)
from ..policy_loss.terms import KL_TYPES, LOSS_MODES, MODE_ALIASES, SEQUENCE_MODES
from .arguments import (
    LINEAR_SCHEMA,
    check_active_rows,
    check_budget,
    check_hidden_index,
    check_linear,
    own_rows,
)
from .attach import attach_gradients, fake_gradients, wanted_gradients
from .centering import Centering, check_support, importance_options
from .chunks import Chunks, RowTokens, gradients_fit
from .gradients import LogProbGradients
from .logprob import linear_token_log_probs
from .reference import reference_logits

register_backends(
    "linear_policy_loss", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference")
)

Results = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]


class _Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    token_ids: Tensor
    active_rows: Tensor | None
    support: RolloutSupport | None
    hidden_index: Tensor | None


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
    hidden_index = check_hidden_index(op, hidden_index, hidden)
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
        two_steps = not _waits_for_all_rows(hidden, weight, head, group, entropy_coeff, rows)
    checked = row_arguments | {"group": None} if two_steps else row_arguments
    options = row_options(op, token_ids, weight.shape[0], **checked)
    if score_centering is not None:
        score_centering = check_support(op, score_centering, token_ids, options, weight.shape[0])
    sharable = backend == "cpp" and score_centering is None
    hidden, hidden_index = own_rows(hidden, hidden_index, options, sharable)
    inputs = _Inputs(hidden, weight, token_ids, active_rows, score_centering, hidden_index)
    if two_steps:
        return _two_step_loss(inputs, head, row_arguments, loss_arguments, backend)
    return _one_pass_loss(inputs, head, options, loss_arguments, grad_scale, backend)


def _waits_for_all_rows(
    hidden: Tensor,
    weight: Tensor,
    head: dict[str, Any],
    group: dist.ProcessGroup | None,
    entropy_coeff: float,
    rows: int,
) -> bool:
    """Return whether gradients up to a factor per row can wait for the log-probs of all rows."""
    if group is not None or entropy_coeff != 0 or head["deterministic"]:
        return False
    hidden = hidden.flatten(0, -2)
    if not has_unscaled_gradient(hidden, ""):
        return False
    return gradients_fit(hidden, weight, head["budget_bytes"], rows)


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
    inputs: _Inputs, head: dict[str, Any], row_arguments: dict, loss_arguments: dict, backend: str
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
    inputs: _Inputs, head: dict[str, Any], row_arguments: dict, loss_arguments: dict, backend: str
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


def _one_pass_loss(
    inputs: _Inputs,
    head: dict[str, Any],
    options: RowOptions,
    loss_arguments: dict,
    grad_scale: float,
    backend: str,
) -> Results:
    """Compute log-probs and gradients chunk by chunk, then loss and metrics by `policy_loss`."""
    hidden, weight, token_ids, active_rows, support, hidden_index = inputs
    op, main_grad = "linear_policy_loss", head["main_grad"]
    hidden = hidden if hidden.dim() == 2 else hidden.flatten(0, -2)
    unknown = hidden.new_empty(token_ids.numel(), dtype=torch.float32)
    given = DEFAULTS | loss_arguments | {"entropy": unknown}
    counts = given.pop("global_num_tokens"), given.pop("global_num_seqs")
    loss_inputs = check_inputs("policy_loss", unknown, **given)
    tensors = (hidden, weight, head["bias"])
    wanted = wanted_gradients(op, tensors)
    log_probs, entropy, centering, *grads = _gradient_op(
        *(None if t is None else t.detach() for t in tensors),
        token_ids.flatten(),
        options,
        head["budget_bytes"],
        head["deterministic"],
        *_op_arguments(loss_inputs, counts, grad_scale),
        *(support or (None, None, None)),
        None if hidden_index is None else hidden_index.flatten(),
        active_rows,
        main_grad is not None,
        wanted,
        backend,
    )
    with torch.no_grad():
        found = {"log_probs": log_probs, "entropy": entropy}
        known = loss_inputs.complete(**found | ({"score_centering": centering} if support else {}))
        loss, metrics = evaluate("policy_loss", known, counts)
    if any(wanted):
        loss = attach_gradients(loss, tensors, grads, main_grad, grad_scale)
    shape = token_ids.shape
    return loss, in_shape(log_probs, shape), in_shape(entropy, shape), metrics


def _op_arguments(inputs: LossInputs, counts: Counts, grad_scale: float) -> tuple[Any, ...]:
    """Return the loss as linear_policy_gradient takes it: tensors per token, then numbers."""
    tokens, cu_seqlens, seq_num_tokens, settings, options, _, is_bounds = inputs
    names = ("advantages", "old_log_probs", "response_mask", "selected", "ref_log_probs")
    per_token = kernel_tensors(tokens, *names, "rollout_is_weights", "rollout_log_probs")
    per_token.append(
        scaled_weights(
            "linear_policy_loss",
            settings.loss_agg_mode,
            tokens["response_mask"],
            cu_seqlens,
            counts,
            settings.loss_scale_factor,
            seq_num_tokens,
            grad_scale,
        )
    )
    modes = LossModes(
        LOSS_MODES.index(settings.loss_mode),
        LOSS_AGG_MODES.index("token-sum"),
        KL_TYPES.index(settings.kl_type),
        settings.kl_straight_through,
        settings.kl_times_ratio,
        wants_tokens=False,
        wants_gradient=True,
        wants_entropy_gradient=settings.entropy_coeff != 0,
    )
    numbers = [*options, *LossCoefficients(settings.kl_coef, settings.entropy_coeff)]
    upper, lower = is_bounds
    bounds = [upper] if lower is None else [upper, lower]
    sequences = cu_seqlens if settings.loss_mode in SEQUENCE_MODES else None
    return *per_token, sequences, [*modes], numbers, bounds


@custom_op(
    "hybridengine::linear_policy_gradient",
    mutates_args=(),
    schema=f"({LINEAR_SCHEMA}, Tensor advantages, Tensor? old_log_probs, Tensor mask, "
    "Tensor? selected, Tensor? ref_log_probs, Tensor? is_weights, Tensor? rollout_log_probs, "
    "Tensor weights, Tensor? cu_seqlens, int[] modes, float[] numbers, float[] is_bounds, "
    "Tensor? kept_ids, Tensor? cu_kept, Tensor? kept_log_probs, Tensor? hidden_index, "
    "Tensor? active_rows, bool wide_weight_grad, bool[] wanted, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    record=RowOptions,
)
def _gradient_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    options: RowOptions,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Compute log_probs, entropy, C of score centering and the gradients of hidden, weight, bias.

    Without recorded entries C is empty. Gradients that are not `wanted` are empty.
    old_log_probs: None for the row's own. weights: the weight of each token in the loss.
    cu_seqlens: of modes by sequence, whose gradients have to fit the buffer together. modes,
    numbers: those of the op policy_loss. is_bounds: the fields of `ImportanceBounds`. kept_ids,
    cu_kept, kept_log_probs: those of `RolloutSupport`.
    """
    budget_bytes, deterministic, *per_token, cu_seqlens, modes, numbers, is_bounds = rest[:-8]
    support = None if rest[-8] is None else RolloutSupport(*rest[-8:-5])
    hidden_index, active_rows, wide_weight_grad, wanted, backend = rest[-5:]
    bounds, mask, shared = ImportanceBounds(*is_bounds), per_token[2], None
    inactive = ~mask
    if hidden_index is not None:
        shared = RowTokens.of(hidden_index, hidden.shape[0])
        if active_rows is not None:  # from here on rows of hidden
            mask = per_token[2] = torch.zeros_like(mask).index_fill_(0, active_rows, True) & mask
        active = shared.any(mask[shared.order])
        inactive = ~active
        active_rows = None if active_rows is None else active.nonzero().squeeze(1)
    grad_rows = 0
    if any(wanted):
        grad_rows = hidden.shape[0] if active_rows is None else active_rows.numel()
    chunks = Chunks(hidden, weight, bias, budget_bytes, deterministic, grad_rows, options.group)
    log_probs, entropy, row_scale, scores = (torch.empty_like(per_token[-1]) for _ in range(4))
    centering = None
    if support is not None:
        scale = torch.where(mask, per_token[0] * per_token[-1], 0)
        centering = Centering(support, scale, mask, None if per_token[6] is None else bounds)

    def gradients(rows: slice | Tensor) -> tuple[Tensor, Tensor | None]:
        part = rows if cu_seqlens is None else slice(None)
        tokens = [None if t is None else t[part] for t in (log_probs, entropy, *per_token)]
        grads = _token_gradients(tokens, cu_seqlens, modes, numbers, bounds, backend)
        if cu_seqlens is None:
            return grads
        return grads[0][rows], None if grads[1] is None else grads[1][rows]

    def factors(rows: slice | Tensor) -> Tensor:
        return gradients(rows)[0] * row_scale[rows]

    # The gradient of the entropy needs a second read of the logits.
    has_bonus = LossModes(*modes).wants_entropy_gradient
    unscaled = not has_bonus and centering is None
    unscaled = unscaled and has_unscaled_gradient(hidden, options.group)
    grads = LogProbGradients(
        chunks,
        token_ids,
        options,
        backend,
        wanted,
        skip_inactive=True,
        inactive=inactive,
        wide_weight=wide_weight_grad,
        factors=factors if unscaled else None,
    )
    for rows, have_gradients in _parts(chunks, active_rows):
        tokens = None if shared is None else shared.take(rows)[0]
        index, cu_tokens = (rows, None) if tokens is None else tokens
        logits, ids, part = grads.logits(rows), token_ids[index], options.select(index)
        if unscaled and have_gradients and any(wanted):
            out = grads.buffer(logits, logits.shape[0])
            results = rows_unscaled_gradient(logits, out, ids, part)
            log_probs[rows], entropy[rows], row_scale[rows] = results
            grads.add(out, rows)
            continue
        row_results = rows_forward(logits, ids, part, False, backend, cu_tokens)
        log_probs[index], entropy[index] = row_results[:2]
        entries = None
        if centering is not None:
            scores[rows], added, entries = centering.of_rows(logits, rows, ids, part, row_results)
        if have_gradients and any(wanted):
            grad_log_probs, grad_entropy = gradients(index)
            if centering is not None:
                grad_log_probs = grad_log_probs + added
            of_tokens = grad_log_probs, grad_entropy, entries, tokens
            grads.add_chunk(logits, rows, row_results, *of_tokens)
    return log_probs, entropy, scores if centering else scores.new_empty(0), *grads.finish()


def _parts(chunks: Chunks, active_rows: Tensor | None) -> Iterator[tuple[slice | Tensor, bool]]:
    """Yield the rows of every chunk, and whether they have gradients: the active ones first."""
    if active_rows is None:
        yield from ((rows, True) for rows in chunks.parts())
        return
    inactive = torch.ones(chunks.hidden.shape[0], dtype=torch.uint8, device=active_rows.device)
    order = inactive.index_fill_(0, active_rows, 0).argsort(stable=True)
    count = active_rows.numel()
    for index, have_gradients in ((order[:count], True), (order[count:], False)):
        yield from ((rows, have_gradients) for rows in chunks.parts(index))


@_gradient_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    one, _, *grads = fake_gradients(hidden, weight, bias, *rest)
    log_probs, entropy = (one.new_empty(token_ids.shape) for _ in range(2))
    scores = torch.empty_like(entropy if rest[-8] is not None else entropy[:0])
    return log_probs, entropy, scores, *grads


def _token_gradients(
    per_token: list[Any],
    cu_seqlens: Tensor | None,
    modes: list[int],
    numbers: list[float],
    is_bounds: ImportanceBounds,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Compute d loss / d log_probs and d loss / d entropy of tokens by the op policy_loss.

    The latter is None without a coefficient.
    """
    log_probs, entropy, advantages, old, mask, selected, ref, is_weights, *rest = per_token
    rollout, weights = rest
    if old is None:
        old = log_probs
    if rollout is not None:
        is_weights = is_bounds.token_weights(old, rollout, mask)
    *_, grad_log_probs, grad_entropy = policy_loss_op(
        log_probs,
        entropy,
        old,
        advantages,
        mask,
        selected,
        ref,
        is_weights,
        cu_seqlens,
        None,
        None,
        modes,
        numbers,
        backend,
    )
    has_entropy = LossModes(*modes).wants_entropy_gradient
    return grad_log_probs * weights, grad_entropy * weights if has_entropy else None
