"""vespo_weights: the sequence weights of VESPO, as weights for the loss mode reinforce."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import _check as check
from .._per_token import (
    TokenSequences,
    as_mask,
    choose_number,
    compute_dtype,
    token_arguments,
    zero_masked,
)
from .terms import MAX_LOG_RATIO, clamped_log_ratio

_MIN_LOG_WEIGHT = math.log(1e-8)


def vespo_weights(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    response_mask: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """Compute phi(w) = exp(lambda) w^k exp(-lambda w), w the importance ratio of the sequence.

    The loss of VESPO is `policy_loss(log_probs, None, advantages, loss_mode="reinforce",
    rollout_is_weights=vespo_weights(...))`: -phi(w) A log p. As in TRL 1.16.0: log-ratios are
    clamped to [-20, 20], their sum to [log 1e-8, 20].

    Args:
        log_probs, old_log_probs, advantages: [T], packed tokens, or [B, L], whose rows are the
            sequences; constants.
        cu_seqlens: [N + 1] int32 or int64; needed with [T].
        response_mask: the same shape, bool or 0/1; what masked tokens hold does not matter.
        rollout_is_weights: the same shape, weights against the rollout engine per token; w is
            multiplied by their product over the sequence.
        k_pos, lambda_pos, k_neg, lambda_neg: for advantages of at least 0 and below 0; k not
            negative, lambda positive.

    Returns:
        The shape of log_probs, 0 where masked, without gradient; float64 for float64, else float32.

    Raises:
        ValueError: a number out of its range, shapes, dtypes or devices, [T] without cu_seqlens.
    """
    op = "vespo_weights"
    check.not_none(op, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    for name, value in (("k_pos", k_pos), ("k_neg", k_neg)):
        check.number(op, name, value, at_least=0)
    for name, value in (("lambda_pos", lambda_pos), ("lambda_neg", lambda_neg)):
        check.number(op, name, value, above=0)
    floats = {
        "log_probs": log_probs,
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "rollout_is_weights": rollout_is_weights,
    }
    tokens, cu_seqlens = token_arguments(op, floats, {"response_mask": response_mask}, cu_seqlens)
    if cu_seqlens is None:
        raise ValueError(f"{op}: log_probs is [T]; give cu_seqlens, or [B, L].")
    with torch.no_grad():
        dtype = compute_dtype(log_probs)
        mask = as_mask(tokens.get("response_mask"), tokens["log_probs"])
        values = {
            name: zero_masked(tensor.to(dtype), mask)
            for name, tensor in tokens.items()
            if name != "response_mask"
        }
        log_ratio = clamped_log_ratio(values["log_probs"], values["old_log_probs"])
        if rollout_is_weights is not None:
            log_is = values["rollout_is_weights"].log().clamp(_MIN_LOG_WEIGHT, MAX_LOG_RATIO)
            log_ratio = log_ratio + log_is
        log_w = TokenSequences.of(cu_seqlens, mask).sum(log_ratio, mask)
        log_w = log_w.clamp(_MIN_LOG_WEIGHT, MAX_LOG_RATIO)
        positive = values["advantages"] >= 0
        k, rate = (
            choose_number(positive, pos, neg, dtype)
            for pos, neg in ((k_pos, k_neg), (lambda_pos, lambda_neg))
        )
        phi = (rate + k * log_w - rate * log_w.exp()).exp()
    return zero_masked(phi, mask).view(log_probs.shape)
