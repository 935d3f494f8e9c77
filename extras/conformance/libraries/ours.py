"""The operations by hybridengine's own functions, in float32."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hybridengine.conformance.case import with_gradient
from hybridengine.conformance.cases.aggregation import PolicyLoss, Split
from hybridengine.kernels import (
    aggregate_loss,
    gae,
    group_advantage,
    linear_cross_entropy,
    linear_distillation_loss,
    linear_token_log_probs,
    rollout_correction,
    sparse_linear_token_log_probs,
    token_kl,
    token_log_probs,
    tree_attention,
)
from hybridengine.kernels import (
    policy_loss as _policy_loss,
)
from hybridengine.kernels import (
    value_loss as _value_loss,
)
from hybridengine.kernels import (
    vespo_weights as _vespo_weights,
)
from hybridengine.kernels import (
    whiten as _whiten,
)
from hybridengine.moe.adapters import expert_factors

_MODES = {"ppo": "ppo_clip"}


def group_advantages(
    rewards: Tensor, groups: Tensor, estimator: str, scored: Tensor | None = None
) -> Tensor:
    return group_advantage(rewards.float(), groups, estimator=estimator, valid=scored)


def returns(
    rewards: Tensor, values: Tensor | None, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    values = None if values is None else values.float()
    _, result = gae(rewards.float(), values, gamma=gamma, lam=lam, response_mask=mask)
    return result


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    return _whiten(values.float(), mask)


def policy_loss(**inputs: Any) -> Tensor:
    """The parts have the counts of the batch; ranks and micro-batches add up."""
    batch = PolicyLoss(**inputs)

    def loss(x: Tensor, part: PolicyLoss) -> Tensor:
        return _policy_loss(
            x,
            part.old,
            part.advantages[:, None].expand_as(x).contiguous(),
            response_mask=part.mask,
            loss_mode=_MODES.get(part.mode, part.mode),
            clip_ratio_low=part.low,
            clip_ratio_high=part.high,
            clip_ratio_c=part.dual_clip,
            loss_agg_mode=part.aggregation,
            loss_scale_factor=part.max_length,
            global_num_tokens=int(batch.mask.sum()),
            global_num_seqs=int(batch.mask.any(1).sum()),
            ref_log_probs=part.ref,
            kl_coef=part.kl_coef,
            kl_times_ratio=part.kl_times_ratio,
            rollout_is_weights=part.weights,
        )[0]

    return batch.over_ranks(loss, torch.sum)


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float, split: Split
) -> Tensor:
    def total(x: Tensor) -> Tensor:
        parts = []
        for rows in (list(rows) for rank in split for rows in rank):
            loss, _ = _value_loss(
                x[rows],
                old[rows].float(),
                returns[rows].float(),
                response_mask=mask[rows],
                cliprange_value=clip,
                global_num_tokens=int(mask.sum()),
            )
            parts.append(loss)
        return torch.stack(parts).sum()

    return with_gradient(total, values.float())


def kl(log_probs: Tensor, ref: Tensor, kind: str) -> Tensor:
    return with_gradient(lambda x: token_kl(kind, x, ref.float()), log_probs.float())


def vespo_weights(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    per_token = advantages.float()[:, None].expand_as(mask).contiguous()
    phi = _vespo_weights(log_probs.float(), old.float(), per_token, response_mask=mask)
    return phi.amax(1)


def rollout_weights(
    old: Tensor, rollout: Tensor, mask: Tensor, level: str, upper: float, lower: float | None
) -> Tensor:
    weights = rollout_correction(
        old.float(),
        rollout.float(),
        response_mask=mask,
        rollout_is=level,
        rollout_is_threshold=upper,
        rollout_is_lower=lower,
    ).weights
    assert weights is not None
    return weights.where(mask, 0)


def rejection(
    old: Tensor, rollout: Tensor, mask: Tensor, criterion: str, bound: tuple[float, float]
) -> Tensor:
    correction = rollout_correction(
        old.float(),
        rollout.float(),
        response_mask=mask,
        rollout_is=None,
        rejection={criterion: bound},
    )
    return correction.response_mask.float()


def kept_loss(losses: Tensor, old: Tensor, rollout: Tensor, mask: Tensor, bound: float) -> Tensor:
    correction = rollout_correction(
        old.float(),
        rollout.float(),
        response_mask=mask,
        rollout_is_threshold=None,
        rejection={"token_k1": (math.exp(-bound), math.exp(bound))},
    )
    assert correction.weights is not None
    return aggregate_loss(
        losses.float() * correction.weights, response_mask=correction.response_mask
    )


def log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return token_log_probs(logits.float(), ids, temperature)[0]


def kept_log_probs(logits: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
    """The logits are hidden states under a head of the unit matrix."""
    cu_kept = torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)])
    head = torch.eye(logits.shape[1])
    return sparse_linear_token_log_probs(logits.float(), head, ids, kept.nonzero()[:, 1], cu_kept)[
        0
    ]


def tied_gradient(weight: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    return with_gradient(lambda w: linear_token_log_probs(w[ids], w, labels)[0], weight.float())


def row_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    def loss(h: Tensor) -> Tensor:
        return linear_cross_entropy(h, weight.float(), labels, reduction="none")[0] * rows.float()

    return with_gradient(loss, hidden.float())


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, num_items: int) -> Tensor:
    def loss(h: Tensor) -> Tensor:
        return linear_cross_entropy(h, weight.float(), labels, num_items_in_batch=num_items)[0]

    return with_gradient(loss, hidden.float())


def distillation(student: Tensor, teacher: Tensor, mask: Tensor, beta: float) -> Tensor:
    head = torch.eye(student.shape[1])
    states = student.float(), head, teacher.float(), head
    return linear_distillation_loss(*states, beta=beta, response_mask=mask)[0].view(1)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0).repeat_interleave(sizes)
    return tree_attention(query.float(), key.float(), value.float(), ends)


def expert_delta(left: Tensor, right: Tensor, num_experts: int, rank: int) -> Tensor:
    of_left, of_right = expert_factors(left.float(), right.float(), rank)
    return of_left @ of_right
