"""The arguments of policy_loss and token_policy_loss, checked and flattened."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from .. import _check as check
from .._aggregation import check_aggregation, check_seq_num_tokens
from .._backend import choose_backend
from .._per_token import as_mask, token_arguments
from .importance import ImportanceBounds
from .reference import LossSettings
from .terms import (
    LOSS_MODES,
    MODE_ALIASES,
    SELECTION_MODES,
    SEQUENCE_MODES,
    LossOptions,
    check_kl_type,
)


class LossInputs(NamedTuple):
    tokens: dict[str, Tensor]  # the per-token arguments, each [T]
    cu_seqlens: Tensor | None
    seq_num_tokens: Tensor | None
    settings: LossSettings
    options: LossOptions
    backend: str
    is_bounds: ImportanceBounds = ImportanceBounds(math.inf)

    def complete(self, **tokens: Tensor) -> LossInputs:
        """Return the inputs with these, with old log-probs, and with importance weights.

        Old log-probs that are not given are those of the call, and importance weights are formed
        from them and from `rollout_log_probs`.
        """
        tokens = self.tokens | tokens
        tokens.setdefault("old_log_probs", tokens["log_probs"].detach())
        rollout = tokens.pop("rollout_log_probs", None)
        if rollout is not None:
            mask = as_mask(tokens.get("response_mask"), tokens["log_probs"])
            weights = self.is_bounds.token_weights(tokens["old_log_probs"], rollout, mask)
            tokens["rollout_is_weights"] = weights
        return LossInputs(tokens, *self[1:])  # `_replace` takes several times as long


def check_inputs(
    op: str,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    *,
    response_mask: Tensor | None,
    loss_mode: str,
    clip_ratio_low: float | None,
    clip_ratio_high: float | None,
    clip_ratio_c: float | None,
    seq_clip_ratio_c: float | None,
    tau_pos: float,
    tau_neg: float,
    selected: Tensor | None,
    cov_kl_coef: float,
    dro_beta: float,
    loss_agg_mode: str,
    loss_scale_factor: float | None,
    cu_seqlens: Tensor | None,
    seq_num_tokens: Tensor | None,
    ref_log_probs: Tensor | None,
    kl_coef: float,
    kl_type: str,
    kl_times_ratio: bool,
    kl_input_clamp: float | None,
    kl_output_clamp: float | None,
    entropy: Tensor | None,
    entropy_coeff: float,
    rollout_is_weights: Tensor | None,
    rollout_log_probs: Tensor | None,
    rollout_is_threshold: float | None,
    rollout_is_lower: float | None,
    score_centering: Tensor | None,
    backend: str | None,
) -> LossInputs:
    """Check the arguments of `op`, which are those of policy_loss, and flatten them.

    Call `complete` on the result, with log-probs and entropy if they were not known here.
    """
    check.not_none(op, log_probs=log_probs, advantages=advantages)
    check.choice(op, "loss_mode", loss_mode, LOSS_MODES, tuple(MODE_ALIASES))
    loss_mode = MODE_ALIASES.get(loss_mode, loss_mode)
    loss_scale_factor = check_aggregation(op, loss_agg_mode, loss_scale_factor)
    options = LossOptions.checked(
        op,
        loss_mode,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=seq_clip_ratio_c if loss_mode == "gspo" else clip_ratio_c,
        tau_pos=tau_pos,
        tau_neg=tau_neg,
        cov_kl_coef=cov_kl_coef,
        dro_beta=dro_beta,
        kl_input_clamp=kl_input_clamp,
        kl_output_clamp=kl_output_clamp,
    )
    settings = LossSettings(
        loss_mode,
        loss_agg_mode,
        check_kl_type(op, kl_type),
        kl_type.endswith("+"),
        _check_coefficient(op, "kl_coef", kl_coef, "ref_log_probs", ref_log_probs),
        _check_coefficient(op, "entropy_coeff", entropy_coeff, "entropy", entropy),
        loss_scale_factor,
        kl_times_ratio,
    )
    floats = {
        "log_probs": log_probs,
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "ref_log_probs": ref_log_probs,
        "entropy": entropy,
        "rollout_is_weights": rollout_is_weights,
        "rollout_log_probs": rollout_log_probs,
        "score_centering": score_centering,
    }
    is_bounds = _check_rollout(
        op, rollout_is_weights, rollout_log_probs, rollout_is_threshold, rollout_is_lower
    )
    masks = {"response_mask": response_mask, "selected": selected}
    tokens, cu_seqlens = token_arguments(op, floats, masks, cu_seqlens)
    _check_needs(op, settings, cu_seqlens, selected)
    if score_centering is not None:
        check_centered_mode(op, loss_mode)
    seq_num_tokens = check_seq_num_tokens(op, loss_agg_mode, cu_seqlens, seq_num_tokens)
    backend = choose_backend("policy_loss", log_probs.device, backend, log_probs.dtype)
    return LossInputs(tokens, cu_seqlens, seq_num_tokens, settings, options, backend, is_bounds)


def check_centered_mode(op: str, loss_mode: str) -> None:
    """Check that the score of a token does not depend on its sequence."""
    if loss_mode in SEQUENCE_MODES:
        raise ValueError(
            f"{op}: score_centering is given with loss_mode {loss_mode!r}, where the score of a "
            "token has the ratio of its sequence as a factor; choose a mode by token, or leave it "
            "out."
        )


def _check_coefficient(
    op: str, name: str, value: float, needs: str, tensor: Tensor | None
) -> float:
    """Check for a finite coefficient, and for the tensor it multiplies unless it is 0."""
    number = check.number(op, name, value)
    if number and tensor is None:
        raise ValueError(
            f"{op}: {name} is {value}, but {needs} is not given; give both or neither."
        )
    return number


def _check_rollout(
    op: str,
    weights: Tensor | None,
    log_probs: Tensor | None,
    threshold: float | None,
    lower: float | None,
) -> ImportanceBounds:
    """Check the arguments that importance weights are formed from; return their bounds."""
    if weights is not None and log_probs is not None:
        raise ValueError(
            f"{op}: rollout_is_weights and rollout_log_probs are given; expected one of them: the "
            "weights are formed from the log-probs."
        )
    return ImportanceBounds.checked(op, threshold, lower)


def _check_needs(
    op: str, settings: LossSettings, cu_seqlens: Tensor | None, selected: Tensor | None
) -> None:
    loss_mode = settings.loss_mode
    if cu_seqlens is None and loss_mode in SEQUENCE_MODES:
        raise ValueError(f"{op}: loss_mode {loss_mode!r} works on sequences; give cu_seqlens.")
    if loss_mode in SELECTION_MODES and selected is None:
        raise ValueError(
            f"{op}: loss_mode {loss_mode!r} needs selected, a mask of tokens; "
            "select_by_covariance makes it."
        )
    if settings.kl_times_ratio and loss_mode == "gmpo":
        raise ValueError(
            f"{op}: kl_times_ratio is given with loss_mode 'gmpo', whose geometric mean is no "
            "ratio of a token; choose another mode, or leave it out."
        )
