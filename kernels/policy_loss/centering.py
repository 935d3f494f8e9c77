"""Score centering: remove the drift of a policy gradient towards a rollout engine that differs.

Tokens are sampled from the engine's distribution q, and p is trained. At one position the expected
gradient of a token's loss -A w log p(y), with importance weight w, has two parts (arXiv 2609.20807,
eq. 3; w in eq. 14):

    E_q[A w ∇log p] = E_q[A] · Σ_v q_v w_v ∇log p_v  +  Cov_q(A, w ∇log p)

The first moves p whatever the rewards are: it is 0 where w = p / q, since Σ_v p_v ∇log p_v = 0, and
not where the engine differs and w is 1 or truncated. Score centering subtracts the expected score
Σ_v q_v w_v ∇log p_v from the score of every token, so that a constant advantage has gradient 0. The
loss of a token becomes

    -A w log p(y) + A C,    ∇C = Σ_{v in S} (q_v w(p_v / q_v) - tail p_v) ∇log p_v
    tail = r w(1 / r),      r = (1 - Σ_S q) / (1 - Σ_S p)

S holds the entries whose engine log-probs were recorded: all that top-k and top-p kept, over which
p and q are normalised, or the most likely ones of a full distribution. Outside S, q is taken as r p
(eq. 7 to 12). Where S is the whole support nothing is outside, and `tail` does not matter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _check as check
from .._per_token import as_mask, compute_dtype, row_index, segment_reduce, zero_masked
from .importance import ImportanceBounds
from .terms import log_ratio

# Of the probability outside S: in float32 a sum of probabilities has an error of about 1e-7.
_MIN_TAIL = 1e-6


class RolloutSupport(NamedTuple):
    """The vocabulary entries whose log-probs the rollout engine recorded, end to end for T tokens.

    kept_ids: int32 or int64 [K], ascending for each token.
    cu_kept: int32 or int64 [T + 1]; token t has kept_ids[cu_kept[t]:cu_kept[t + 1]]. A token
        without entries is not centered.
    log_probs: [K], of the engine, constants.
    """

    kept_ids: Tensor
    cu_kept: Tensor
    log_probs: Tensor


def score_centering(
    kept_log_probs: Tensor,
    rollout_log_probs: Tensor,
    cu_kept: Tensor,
    *,
    response_mask: Tensor | None = None,
    rollout_is: str | None = None,
    rollout_is_threshold: float | None = 2.0,
    rollout_is_lower: float | None = None,
) -> Tensor:
    """Compute the expected score C of every token, for `policy_loss(score_centering=)`.

    arXiv 2609.20807, eq. 7 to 14.

    Args:
        kept_log_probs: [K], of the trained policy at the recorded entries; differentiable.
        rollout_log_probs: [K], of the engine at the same entries, constants. Both are normalised
            over the same entries: those that sampling kept, or the full vocabulary.
        cu_kept: [T + 1] int32 or int64: token t has the entries cu_kept[t] to cu_kept[t + 1] - 1;
            without entries its C is 0.
        response_mask: [T], bool or 0/1; what the entries of masked tokens hold does not matter.
        rollout_is: "token" where the loss has importance weights per token, None where not.
        rollout_is_threshold, rollout_is_lower: the bounds of those weights, as in policy_loss.

    Returns:
        [T], float64 for float64 kept_log_probs, else float32. Its value is Σ_S q_v w(p_v / q_v)
        log p_v; its gradient by log p_v has -tail p_v, too, and is not differentiated.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown rollout_is, bounds that
            are not positive or inverted.

    Examples:
        >>> p = torch.tensor([0.5, 0.5]).log().requires_grad_()
        >>> q = torch.tensor([0.75, 0.25]).log()
        >>> score_centering(p, q, torch.tensor([0, 2])).sum().backward()
        >>> [round(value, 2) for value in (p.grad - p.grad.mean()).tolist()]  # q - p
        [0.25, -0.25]
    """
    op = "score_centering"
    check.not_none(op, kept_log_probs=kept_log_probs, rollout_log_probs=rollout_log_probs)
    tensors = {"kept_log_probs": kept_log_probs, "rollout_log_probs": rollout_log_probs}
    check.same_device(op, **tensors, cu_kept=cu_kept, response_mask=response_mask)
    check.floats(op, **tensors)
    sizes: check.Sizes = {}
    for name, tensor in tensors.items():
        check.shape(op, name, tensor, "K", sizes)
    cu_kept = check.cu_seqlens(op, cu_kept, kept_log_probs.shape[0], name="cu_kept")
    if response_mask is not None:
        check.shape(
            op, "response_mask", response_mask, "T", {"T": (cu_kept.numel() - 1, "cu_kept")}
        )
        response_mask = check.mask(op, "response_mask", response_mask)
    bounds = centering_bounds(op, rollout_is, rollout_is_threshold, rollout_is_lower)
    check.untransformed(op, **tensors, cu_kept=cu_kept, response_mask=response_mask)
    log_probs = kept_log_probs.to(compute_dtype(kept_log_probs))
    return _Scores.apply(log_probs, rollout_log_probs, cu_kept, response_mask, bounds)


class _Scores(torch.autograd.Function):
    """C of every token, with the factors as its gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        log_p, log_q, ends, mask, bounds = arguments
        rows = row_index(ends, log_p.shape[0])
        if mask is not None:
            log_p, log_q = (torch.where(mask[rows], x, -torch.inf) for x in (log_p, log_q))
        mass, factors = centering_factors(log_p, log_q, ends, rows, bounds)
        ctx.save_for_backward(factors.to(log_p.dtype), rows, arguments[0])
        return expected_log_probs(mass, log_p, ends).to(log_p.dtype)

    @staticmethod
    @check.differentiable_once("score_centering")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factors, rows, _ = ctx.saved_tensors
        return factors * grad[rows], None, None, None, None


def expected_log_probs(mass: Tensor, log_p: Tensor, ends: Tensor) -> Tensor:
    """Return the sum of mass * log p over the entries of every token, float64 [T]."""
    return segment_reduce(mass * torch.where(log_p.isneginf(), 0, log_p.double()), ends, "sum")


def centering_terms(tokens: dict[str, Tensor]) -> Tensor:
    """Return advantages * C of the per-token arguments of policy_loss, [T], 0 where masked."""
    log_probs, centering = tokens["log_probs"], tokens["score_centering"]
    mask = as_mask(tokens.get("response_mask"), log_probs)
    dtype = compute_dtype(log_probs)
    return zero_masked(tokens["advantages"].detach().to(dtype) * centering.to(dtype), mask)


def centering_bounds(
    op: str, rollout_is: str | None, threshold: float | None, lower: float | None
) -> ImportanceBounds | None:
    """Return the bounds of the importance weights per token; None: there are no weights."""
    bounds = ImportanceBounds.checked(op, threshold, lower)
    if rollout_is is None:
        return None
    check.choice(op, "rollout_is", rollout_is, ("token",))
    return bounds


def centering_factors(
    log_p: Tensor,
    rollout_log_probs: Tensor,
    ends: Tensor,
    rows: Tensor,
    bounds: ImportanceBounds | None,
) -> tuple[Tensor, Tensor]:
    """Compute q w(p / q) and q w(p / q) - tail p, float64 [K] each; 0 where log p is -inf.

    log_p, rollout_log_probs: [K], constants. ends: [T + 1]; rows: [K], the token of every entry.
    bounds: of the importance weights; None for weights of 1.
    """
    possible = ~log_p.isneginf()
    log_p, log_q = log_p.double(), rollout_log_probs.double()
    p, q = log_p.exp(), log_q.exp()
    tail_p, tail_q = ((1 - segment_reduce(x, ends, "sum")).clamp(min=0) for x in (p, q))
    tail = tail_q / tail_p.clamp(min=_MIN_TAIL)
    if bounds is not None:
        q = q * bounds.weights(log_ratio(log_p, log_q))[0]
        tail = tail * bounds.weights(-tail.log())[0]
    mass = torch.where(possible, q, 0)
    return mass, torch.where(possible, q - tail[rows] * p, 0)
