"""token_policy_loss: the policy loss of every token, for callers that aggregate by themselves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _check as check
from .._library import apply
from .arguments import LossInputs, check_inputs
from .centering import centering_terms
from .op import DEFAULTS, NO_GRADIENTS, kernel_arguments, policy_loss_op
from .reference import policy_loss_reference
from .terms import SEQUENCE_RATIO_MODES


class TokenLosses(NamedTuple):
    """Results of `token_policy_loss`, of the shape of its inputs, 0 where masked."""

    loss: Tensor  # pg + kl_coef kl - entropy_coeff entropy + centering; differentiable
    kl: Tensor  # without gradient, as those that follow; 0 without ref_log_probs
    ratio: Tensor  # importance ratio that the mode uses
    clipped: Tensor  # bool: the upper clip, mask or selection took effect
    clipped_lower: Tensor  # bool: the second bound (dual clip, truncation) took effect


# Those of policy_loss, without the aggregation's.
_AGGREGATION = (
    "loss_agg_mode",
    "loss_scale_factor",
    "seq_num_tokens",
    "global_num_tokens",
    "global_num_seqs",
)
_DEFAULTS = {name: default for name, default in DEFAULTS.items() if name not in _AGGREGATION}


def token_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor | None, advantages: Tensor, **arguments: Any
) -> TokenLosses:
    """Compute the loss of every token, not aggregated.

    Args:
        log_probs, old_log_probs, advantages: [T] or [B, L], as in `policy_loss`.
        arguments: the others of `policy_loss` but loss_agg_mode, loss_scale_factor, seq_num_tokens
            and the global denominators; see `aggregate_loss`.

    Returns:
        TokenLosses. Its loss is differentiable with respect to log_probs and entropy, once and in
        reverse mode; float64 for float64 log_probs, else float32.

    Raises:
        TypeError: an argument that is not one of these.
        ValueError: as policy_loss; gmpo, and kl_times_ratio with gspo or seq_sapo, where the loss
            of a token depends on the log-probs of all its sequence.

    Examples:
        >>> losses = token_policy_loss(torch.tensor([-1.0, -2.0]), None, torch.tensor([1.0, -3.0]))
        >>> losses.loss.tolist(), losses.ratio.tolist()
        ([-1.0, 3.0], [1.0, 1.0])
    """
    op = "token_policy_loss"
    unknown = arguments.keys() - _DEFAULTS.keys()
    if unknown:
        raise TypeError(
            f"{op}: {sorted(unknown)[0]} is not an argument of it; expected those of policy_loss "
            "but the aggregation's: use aggregate_loss on the result."
        )
    inputs = check_inputs(
        op,
        log_probs,
        old_log_probs,
        advantages,
        loss_agg_mode="token-sum",
        loss_scale_factor=None,
        seq_num_tokens=None,
        **_DEFAULTS | arguments,
    ).complete()
    mode = inputs.settings.loss_mode
    if mode == "gmpo" or (inputs.settings.kl_times_ratio and mode in SEQUENCE_RATIO_MODES):
        option = "" if mode == "gmpo" else " with kl_times_ratio"
        raise ValueError(
            f"{op}: loss_mode is {mode!r}{option}, where the loss of a token depends on its whole "
            "sequence; use policy_loss."
        )
    terms, clips = _run(op, inputs)
    if "score_centering" in inputs.tokens:
        terms[0] = terms[0] + centering_terms(inputs.tokens)
    return TokenLosses(*(t.view(log_probs.shape) for t in (*terms, *clips.unbind())))


def _run(op: str, inputs: LossInputs) -> tuple[list[Tensor], Tensor]:
    """Compute loss, KL and ratio, each [T], and the clip masks [2, T]."""
    if inputs.backend == "reference":
        ones = torch.ones(2, dtype=torch.float64, device=inputs.tokens["log_probs"].device)
        *_, terms, clips = policy_loss_reference(*inputs[:3], ones, inputs.settings, inputs.options)
        return [terms[0], *terms[1:].detach()], clips
    arguments = kernel_arguments(op, inputs, (1.0, 1.0), wants_tokens=True)
    if not arguments.wants_gradients:
        _, _, terms, clips, *_ = policy_loss_op(*arguments)
        return [*terms], clips
    loss, terms, clips = apply(_TokenPolicyLoss, *arguments)
    return [loss, *terms], clips


class _TokenPolicyLoss(torch.autograd.Function):
    """The terms of the op policy_loss, whose gradients are those of each token: weights are 1."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        _, _, terms, clips, *gradients = policy_loss_op(*arguments)
        loss, others = terms[0], terms[1:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(others, clips)
        # The two inputs let a second derivative find the node that raises.
        ctx.save_for_backward(*gradients, *arguments[:2])
        return loss, others, clips

    @staticmethod
    @check.differentiable_once("token_policy_loss")
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradients = zip(ctx.saved_tensors[:2], ctx.needs_input_grad[:2], strict=True)
        return *(g * grad_loss if needs else None for g, needs in gradients), *NO_GRADIENTS
