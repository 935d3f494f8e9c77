"""The policy loss from hidden states in one pass: gradients of logits while they are in the buffer.

Old log-probs (or that they are the row's own), advantages, mask and the global denominators are
known before the forward. So the gradient of a chunk of logits can be computed right after its rows
are reduced. Inactive rows, whose gradient is zero (masked, zero advantage, clipped), are left out
of the two gradient products where the host knows them. docs/operators.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._aggregation import LOSS_AGG_MODES, Counts, scaled_weights
from .._library import custom_op
from .._per_token import compute_dtype
from ..logprob.options import RowOptions, in_shape
from ..logprob.rows import has_unscaled_gradient, rows_forward, rows_unscaled_gradient
from ..policy_loss.arguments import LossInputs, check_inputs
from ..policy_loss.centering import RolloutSupport
from ..policy_loss.importance import ImportanceBounds
from ..policy_loss.op import (
    DEFAULTS,
    LossCoefficients,
    LossModes,
    evaluate,
    kernel_tensors,
    policy_loss_op,
)
from ..policy_loss.terms import KL_TYPES, LOSS_MODES, SEQUENCE_MODES
from .attach import attach_gradients, fake_gradients, wanted_gradients
from .centering import Centering
from .chunks import Chunks, gradients_fit
from .gradients import LogProbGradients
from .shared_rows import RowTokens

_OP = "linear_policy_loss"

Results = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]


class PolicyInputs(NamedTuple):
    """The checked tensors of the operator; hidden is [D, H] with hidden_index."""

    hidden: Tensor
    weight: Tensor
    token_ids: Tensor
    active_rows: Tensor | None
    support: RolloutSupport | None
    hidden_index: Tensor | None


class TokenLoss(NamedTuple):
    """What the loss is computed from, except for the log-probs and the entropy; tensors are [T].

    modes, numbers: those of the op policy_loss.
    is_bounds: the fields of `ImportanceBounds`.
    """

    advantages: Tensor
    old_log_probs: Tensor | None  # None: the row's own
    mask: Tensor
    selected: Tensor | None
    ref_log_probs: Tensor | None
    is_weights: Tensor | None
    rollout_log_probs: Tensor | None  # given, is_weights are formed from these
    weights: Tensor  # of each token in the loss, times the incoming gradient
    cu_seqlens: Tensor | None  # of modes by sequence, whose gradients need all log-probs
    modes: list[int]
    numbers: list[float]
    is_bounds: list[float]

    @staticmethod
    def of(inputs: LossInputs, counts: Counts, grad_scale: float) -> TokenLoss:
        """counts: global_num_tokens and global_num_seqs. grad_scale: the incoming gradient."""
        tokens, cu_seqlens, seq_num_tokens, settings, options, _, is_bounds = inputs
        names = ("advantages", "old_log_probs", "response_mask", "selected", "ref_log_probs")
        advantages, old, mask, selected, ref, is_weights, rollout = kernel_tensors(
            tokens, *names, "rollout_is_weights", "rollout_log_probs"
        )
        assert advantages is not None and mask is not None
        weights = scaled_weights(
            _OP,
            settings.loss_agg_mode,
            tokens["response_mask"],
            cu_seqlens,
            counts,
            settings.loss_scale_factor,
            seq_num_tokens,
            grad_scale,
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
        bounds = [bound for bound in is_bounds if bound is not None]
        sequences = cu_seqlens if settings.loss_mode in SEQUENCE_MODES else None
        per_token = advantages, old, mask, selected, ref, is_weights, rollout, weights
        return TokenLoss(*per_token, sequences, [*modes], numbers, bounds)

    @property
    def has_bonus(self) -> bool:
        """Whether the entropy has a gradient."""
        return bool(LossModes(*self.modes).wants_entropy_gradient)

    def gradients(
        self, log_probs: Tensor, entropy: Tensor, rows: slice | Tensor, backend: str
    ) -> tuple[Tensor, Tensor | None]:
        """Compute d loss / d log_probs and d loss / d entropy (None without a bonus) of some rows.

        log_probs, entropy: [T], which those of other rows may lack unless there are cu_seqlens.
        """
        if self.cu_seqlens is None:
            end = self._fields.index("cu_seqlens")
            per_token: Any = (None if x is None else x[rows] for x in self[:end])
            part = TokenLoss(*per_token, *self[end:])
            return part._all_gradients(log_probs[rows], entropy[rows], backend)
        of_log_probs, of_entropy = self._all_gradients(log_probs, entropy, backend)
        return of_log_probs[rows], None if of_entropy is None else of_entropy[rows]

    def _all_gradients(
        self, log_probs: Tensor, entropy: Tensor, backend: str
    ) -> tuple[Tensor, Tensor | None]:
        old = log_probs if self.old_log_probs is None else self.old_log_probs
        is_weights = self.is_weights
        if self.rollout_log_probs is not None:
            bounds = ImportanceBounds(*self.is_bounds)
            is_weights = bounds.token_weights(old, self.rollout_log_probs, self.mask)
        *_, of_log_probs, of_entropy = policy_loss_op(
            log_probs,
            entropy,
            old,
            self.advantages,
            self.mask,
            self.selected,
            self.ref_log_probs,
            is_weights,
            self.cu_seqlens,
            None,
            None,
            self.modes,
            self.numbers,
            backend,
        )
        return of_log_probs * self.weights, of_entropy * self.weights if self.has_bonus else None


def waits_for_all_rows(
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


def one_pass_loss(
    inputs: PolicyInputs,
    head: dict[str, Any],
    options: RowOptions,
    loss_arguments: dict,
    grad_scale: float,
    backend: str,
) -> Results:
    """Compute log-probs and gradients chunk by chunk, then loss and metrics by `policy_loss`."""
    hidden, weight, token_ids, active_rows, support, hidden_index = inputs
    main_grad = head["main_grad"]
    hidden = hidden if hidden.dim() == 2 else hidden.flatten(0, -2)
    unknown = hidden.new_empty(token_ids.numel(), dtype=torch.float32)
    given = DEFAULTS | loss_arguments | {"entropy": unknown}
    counts = given.pop("global_num_tokens"), given.pop("global_num_seqs")
    loss_inputs = check_inputs("policy_loss", unknown, **given)
    tensors = (hidden, weight, head["bias"])
    wanted = wanted_gradients(_OP, tensors)
    log_probs, entropy, centering, *grads = _gradient_op(
        *(None if t is None else t.detach() for t in tensors),
        token_ids.flatten(),
        options,
        head["budget_bytes"],
        head["deterministic"],
        TokenLoss.of(loss_inputs, counts, grad_scale),
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


@custom_op("hybridengine::linear_policy_gradient", mutates_args=())
def _gradient_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    options: RowOptions,
    budget_bytes: int,
    deterministic: bool,
    loss: TokenLoss,
    kept_ids: Tensor | None,
    cu_kept: Tensor | None,
    kept_log_probs: Tensor | None,
    hidden_index: Tensor | None,
    active_rows: Tensor | None,
    wide_weight_grad: bool,
    wanted: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute log_probs, entropy, C of score centering and the gradients of hidden, weight, bias.

    Without recorded entries C is empty. Gradients that are not `wanted` are empty. kept_ids,
    cu_kept, kept_log_probs: those of `RolloutSupport`.
    """
    shared, inactive = RowTokens.of(_OP, hidden_index, hidden.shape[0]), ~loss.mask
    if shared is not None:
        loss, inactive, active_rows = _per_row(loss, shared, active_rows)
    grad_rows = 0
    if any(wanted):
        grad_rows = hidden.shape[0] if active_rows is None else active_rows.numel()
    chunks = Chunks(hidden, weight, bias, budget_bytes, deterministic, grad_rows, options.group)
    log_probs, entropy, row_scale, scores = (torch.empty_like(loss.weights) for _ in range(4))
    centering = None
    if kept_ids is not None and cu_kept is not None and kept_log_probs is not None:
        centering = Centering(
            RolloutSupport(kept_ids, cu_kept, kept_log_probs),
            torch.where(loss.mask, loss.advantages * loss.weights, 0),
            loss.mask,
            None if loss.rollout_log_probs is None else ImportanceBounds(*loss.is_bounds),
        )

    def factors(rows: slice | Tensor) -> Tensor:
        return loss.gradients(log_probs, entropy, rows, backend)[0] * row_scale[rows]

    # The gradient of the entropy needs a second read of the logits.
    unscaled = not loss.has_bonus and centering is None
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
            of_log_probs, of_entropy = loss.gradients(log_probs, entropy, index, backend)
            if centering is not None:
                of_log_probs = of_log_probs + added
            grads.add_chunk(logits, rows, row_results, of_log_probs, of_entropy, entries, tokens)
    return log_probs, entropy, scores if centering else scores.new_empty(0), *grads.finish()


def _per_row(
    loss: TokenLoss, shared: RowTokens, active_rows: Tensor | None
) -> tuple[TokenLoss, Tensor, Tensor | None]:
    """Return the loss of active tokens, the inactive rows [D], and the active ones if given."""
    if active_rows is not None:
        chosen = torch.zeros_like(loss.mask).index_fill_(0, active_rows, True)
        loss = loss._replace(mask=loss.mask & chosen)
    active = shared.any(loss.mask[shared.order])
    return loss, ~active, None if active_rows is None else active.nonzero().squeeze(1)


@_gradient_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    kept_ids: Tensor | None,
    wide_weight_grad: bool,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    num_tokens = token_ids.shape[0]
    sizes = num_tokens, num_tokens, num_tokens if kept_ids is not None else 0
    per_token = (hidden.new_empty(n, dtype=compute_dtype(hidden)) for n in sizes)
    return *per_token, *fake_gradients(hidden, weight, bias, wide_weight_grad, wanted)


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
