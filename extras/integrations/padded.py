"""The operators on padded batches, as other trainers keep them: [B, L] in, [B, L] out.

    from hybridengine.integrations import padded

    log_probs, entropy = padded.linear_token_log_probs(hidden, weight, ids, response_mask=mask)
    loss, metrics = padded.policy_loss(log_probs, None, advantages, mask)

B sequences, L positions, V vocabulary, H hidden size. A mask [B, L] is bool or 0/1, its tokens
anywhere: padding on the left or on the right, holes, empty rows. Results of masked positions are 0,
and what inputs hold there, NaN included, does not matter. Advantages and rollout weights are [B],
[B, 1] or [B, L]. Labels are aligned with their logits or hidden states: shift them before.

Operators over hidden states pack the unmasked positions first, so that no matrix product is over
padding; on a GPU the host waits for their number. The others read [B, L] as it is. docs/dropins.md
lists what verl, TRL, Liger, OpenRLHF and NeMo-RL call them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridengine.kernels import (
    Packed,
    TokenLosses,
    aggregate_loss,
    gae,
    pack,
    rollout_correction,
    rollout_metrics,
    token_entropy,
    token_kl,
    unpack,
    value_loss,
    whiten,
)
from hybridengine.kernels import _check as check
from hybridengine.kernels import group_advantage as _group_advantage
from hybridengine.kernels import linear_policy_loss as _linear_policy_loss
from hybridengine.kernels import linear_token_log_probs as _linear_token_log_probs
from hybridengine.kernels import policy_loss as _policy_loss
from hybridengine.kernels import token_log_probs as _token_log_probs
from hybridengine.kernels import token_policy_loss as _token_policy_loss
from hybridengine.kernels import vespo_weights as _vespo_weights
from hybridengine.kernels.packing import move_rows

__all__ = [
    "TokenLosses",
    "aggregate",
    "gae",
    "group_advantage",
    "group_ids",
    "linear_policy_loss",
    "linear_token_log_probs",
    "policy_loss",
    "rollout_correction",
    "rollout_metrics",
    "token_entropy",
    "token_kl",
    "token_log_probs",
    "token_policy_loss",
    "value_loss",
    "vespo_weights",
    "whiten",
]

_IGNORE = -100


def token_log_probs(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    response_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Compute the log-probability of `token_ids` and the entropy of every position.

    Args:
        logits: [B, L, V]; token_ids: [B, L], or [B, L, K]: K entries of every position.
        response_mask: [B, L]; logits of masked positions are not read.
        temperature, options: those of `hybridengine.kernels.token_log_probs`.

    Returns:
        log_probs in the shape of token_ids, entropy [B, L], float32, and the RowStats with
        return_stats. Entropy alone: `token_entropy(logits, temperature, row_mask=response_mask)`.
    """
    ids = _masked_ids("token_log_probs", token_ids, response_mask, options)
    return _token_log_probs(logits, ids, temperature, **options)


def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    response_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropy from hidden states, of the unmasked positions only.

    Args:
        hidden: [B, L, H]; weight: [V, H]; token_ids: [B, L]; temperature: a number or [B, L].
        options: those of `hybridengine.kernels.linear_token_log_probs`; vocab_mask is [B, L, V].

    Returns:
        log_probs and entropy [B, L] float32, differentiable with respect to hidden, weight, bias.
    """
    op = "linear_token_log_probs"
    if response_mask is None:
        return _linear_token_log_probs(hidden, weight, token_ids, temperature, **options)
    options["temperature"] = temperature
    packed, hidden, ids, options = _packed(op, hidden, token_ids, response_mask, options)
    results = _linear_token_log_probs(hidden, weight, ids, **options)
    log_probs, entropy = unpack(results, packed)
    return log_probs, entropy


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Compute the policy loss from hidden states, of the unmasked positions only.

    Args:
        hidden: [B, L, H]; weight: [V, H]; token_ids: [B, L]; temperature: a number or [B, L].
        old_log_probs: [B, L], constants; None: those of this call.
        advantages: [B], [B, 1] or [B, L], constants; rollout_is_weights likewise.
        options: those of `hybridengine.kernels.linear_policy_loss`; per-token ones are [B, L],
            vocab_mask [B, L, V]. active_rows is not taken.

    Returns:
        (loss, log_probs [B, L], entropy [B, L], metrics); only the loss has a gradient.
    """
    op = "linear_policy_loss"
    options |= {"old_log_probs": old_log_probs, "advantages": advantages}
    options |= _expanded(op, options, token_ids.shape)
    if response_mask is None:
        return _linear_policy_loss(hidden, weight, token_ids, temperature, **options)
    options["temperature"] = temperature
    packed, hidden, ids, options = _packed(op, hidden, token_ids, response_mask, options)
    loss, *results, metrics = _linear_policy_loss(
        hidden, weight, ids, cu_seqlens=packed.cu_seqlens, **options
    )
    log_probs, entropy = unpack(results, packed)
    return loss, log_probs, entropy, metrics


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss to minimise and its metrics.

    Args:
        log_probs: [B, L], differentiable.
        old_log_probs: [B, L], constants; None: log_probs themselves, so that every ratio is 1.
        advantages: [B], [B, 1] or [B, L], constants; rollout_is_weights likewise.
        options: those of `hybridengine.kernels.policy_loss`.

    Returns:
        (loss, metrics), 0-d tensors.
    """
    options |= {"advantages": advantages, "response_mask": response_mask}
    options |= _expanded("policy_loss", options, log_probs.shape)
    return _policy_loss(log_probs, old_log_probs, **options)


def token_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    **options: Any,
) -> TokenLosses:
    """Compute the loss of every token [B, L], not aggregated; see `aggregate`.

    Args:
        log_probs, old_log_probs, advantages, response_mask: as in `policy_loss`.
        options: those of `hybridengine.kernels.token_policy_loss`.
    """
    options |= {"advantages": advantages, "response_mask": response_mask}
    options |= _expanded("token_policy_loss", options, log_probs.shape)
    return _token_policy_loss(log_probs, old_log_probs, **options)


def vespo_weights(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute the weights of VESPO [B, L], for `policy_loss(loss_mode="reinforce")`.

    Args:
        log_probs, old_log_probs: [B, L]; advantages: [B], [B, 1] or [B, L].
        options: those of `hybridengine.kernels.vespo_weights`; rollout_is_weights are [B, L].
    """
    advantages = _expanded("vespo_weights", {"advantages": advantages}, log_probs.shape).get(
        "advantages", advantages
    )
    return _vespo_weights(
        log_probs, old_log_probs, advantages, response_mask=response_mask, **options
    )


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor | Sequence[Hashable],
    response_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute the advantage of every response over the responses to the same prompt.

    Args:
        rewards: [B], one per response.
        group_ids: [B] integers, or B prompt ids of any kind (`group_ids`).
        response_mask: [B, L], to copy the advantages to the unmasked positions; None: [B].
        options: those of `hybridengine.kernels.group_advantage`.
    """
    if not isinstance(group_ids, Tensor):
        group_ids = _numbered(group_ids).to(rewards.device)
    return _group_advantage(rewards, group_ids, response_mask=response_mask, **options)


def group_ids(prompt_ids: Any) -> Tensor:
    """Number prompt ids by first occurrence: int64 [B].

    prompt_ids: B strings, uuids or other hashable values; or a tensor or NumPy array [B].

    Examples:
        >>> group_ids(["b", "a", "b"]).tolist()
        [0, 1, 0]
    """
    return _numbered(prompt_ids)


def aggregate(
    losses: Tensor,
    response_mask: Tensor | None = None,
    loss_agg_mode: str = "token-mean",
    **options: Any,
) -> Tensor:
    """Aggregate losses [B, L] as `hybridengine.kernels.aggregate_loss` does; differentiable.

    options: its further ones.
    """
    options |= {"response_mask": response_mask, "loss_agg_mode": loss_agg_mode}
    return aggregate_loss(losses, **options)


def _numbered(prompt_ids: Any) -> Tensor:
    numbers: dict[Hashable, int] = {}
    ids = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else prompt_ids
    return torch.tensor([numbers.setdefault(one, len(numbers)) for one in ids]).long()


def _masked_ids(
    op: str, token_ids: Tensor, response_mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Return token_ids with ignore_index where masked."""
    if response_mask is None:
        return token_ids
    mask = check.mask(op, "response_mask", response_mask)
    if mask.shape != token_ids.shape[:2]:
        raise ValueError(
            f"{op}: response_mask has shape {list(mask.shape)}; expected "
            f"{list(token_ids.shape[:2])} like token_ids."
        )
    mask = mask.reshape(*mask.shape, *[1] * (token_ids.dim() - mask.dim()))
    return token_ids.masked_fill(~mask, options.get("ignore_index", _IGNORE))


def _expanded(op: str, options: dict[str, Any], shape: torch.Size) -> dict[str, Tensor]:
    """Return advantages and rollout weights of one number per sequence as [B, L]."""
    result = {}
    for name in ("advantages", "rollout_is_weights"):
        given = options.get(name)
        if not isinstance(given, Tensor) or given.shape == shape:
            continue
        if given.shape not in (shape[:1], (*shape[:1], 1)):
            raise ValueError(
                f"{op}: {name} has shape {list(given.shape)}; expected [B], [B, 1] or [B, L] with "
                f"[B, L] = {list(shape)}."
            )
        result[name] = given.reshape(-1, 1).expand(shape)
    return result


# The options of the operators over hidden states with an entry per position.
_PER_POSITION = (
    "temperature",
    "vocab_mask",
    "old_log_probs",
    "advantages",
    "ref_log_probs",
    "selected",
    "rollout_is_weights",
    "rollout_log_probs",
)


def _packed(
    op: str, hidden: Tensor, token_ids: Tensor, response_mask: Tensor, options: dict[str, Any]
) -> tuple[Packed, Tensor, Tensor, dict[str, Any]]:
    """Pack the unmasked positions: (packed, hidden [T, H], token_ids [T], options)."""
    mask = check.mask(op, "response_mask", response_mask)
    sizes: check.Sizes = {}
    check.shape(op, "response_mask", mask, "B L", sizes)
    check.shape(op, "hidden", hidden, "B L H", sizes)
    names = [name for name in _PER_POSITION if isinstance(options.get(name), Tensor)]
    with torch.no_grad():
        packed = pack([token_ids, *(options[name] for name in names)], mask)
    ids, *rows = packed.values
    # By itself: results that are packed together all require a gradient if one does.
    assert packed.inverse is not None
    (hidden,) = move_rows([hidden], packed.indices, packed.inverse, 2, [ids.numel()])
    return packed, hidden, ids, options | dict(zip(names, rows, strict=True))
