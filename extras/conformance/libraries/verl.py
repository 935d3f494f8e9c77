"""The operations by verl's own functions (verl.trainer.ppo.core_algos, rollout_corr_helper)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hybridengine.conformance.case import NotThere, with_gradient
from hybridengine.conformance.cases.aggregation import PolicyLoss, Split

from .services import empty_services

# Services that the functions here do not use.
with empty_services(("ray", "tensordict", "codetiming", "hydra", "pylatexenc", "wandb", "orjson")):
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.utils import torch_functional
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
    from verl.workers.config import ActorConfig

algos: Any = core_algos  # its annotations are narrower than what it takes
_ESTIMATORS = {
    "grpo": algos.compute_grpo_outcome_advantage,
    "rloo": algos.compute_rloo_vectorized_outcome_advantage,
}
_MODES = {"ppo": "vanilla", "gmpo": "geo_mean"}


def group_advantages(
    rewards: Tensor, groups: Tensor, estimator: str, scored: Tensor | None = None
) -> Tensor:
    if scored is not None:
        raise NotThere("its estimators have no mask of responses")
    tokens, mask = rewards.float()[:, None], torch.ones(len(rewards), 1)
    if estimator == "mean":
        compute = algos.compute_grpo_outcome_advantage
        return compute(tokens, mask, groups.numpy(), norm_adv_by_std_in_grpo=False)[0][:, 0]
    return _ESTIMATORS[estimator](tokens, mask, groups.numpy())[0][:, 0]


def returns(
    rewards: Tensor, values: Tensor | None, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    if values is None:
        compute = algos.compute_reinforce_plus_plus_outcome_advantage
        return compute(rewards.float(), mask.float(), config=SimpleNamespace(gamma=gamma))[1]
    tokens = rewards.float(), values.float(), mask.float()
    return algos.compute_gae_advantage_return(*tokens, gamma, lam)[1].where(mask, 0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    return torch_functional.masked_whiten(values.float(), mask.float()).where(mask, 0)


def _config(low: float, high: float, dual_clip: float | None) -> Any:
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    settings = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual_clip or 1e9}
    for name, value in settings.items():
        object.__setattr__(config, name, value)
    return config


def policy_loss(**inputs: Any) -> Tensor:
    """Ranks are averaged, micro-batches added, with the counts of the batch as in its workers."""
    batch = PolicyLoss(**inputs)
    if batch.kl_times_ratio:
        raise NotThere("no KL term times the ratio")
    config = _config(batch.low, batch.high, batch.dual_clip)
    counts = {
        "dp_size": len(batch.split),
        "batch_num_tokens": int(batch.mask.sum()),
        "global_batch_size": len(batch.mask),
        "loss_scale_factor": batch.max_length,
    }
    config.global_batch_info.update(counts)
    compute = algos.get_policy_loss_fn(_MODES.get(batch.mode, batch.mode))

    def loss(x: Tensor, part: PolicyLoss) -> Tensor:
        used, advantages = part.mask.float(), part.advantages[:, None].expand_as(x)
        options = batch.aggregation, config, part.weights
        value, _ = compute(part.old, x, advantages, used, *options)
        if part.ref is not None:
            terms = algos.kl_penalty(x, part.ref, "k3")
            value = value + part.kl_coef * algos.agg_loss(terms, used, batch.aggregation, **counts)
        return value

    return batch.over_ranks(loss, torch.mean)


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float, split: Split
) -> Tensor:
    def part(x: Tensor, rows: list[int]) -> Tensor:
        tokens = x[rows], returns[rows].float(), old[rows].float(), mask[rows].float()
        counts = {"batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
        return algos.compute_value_loss(*tokens, clip, **counts)[0]

    def total(x: Tensor) -> Tensor:
        return torch.stack([part(x, list(rows)) for rank in split for rows in rank]).sum()

    return with_gradient(total, values.float())


def kl(log_probs: Tensor, ref: Tensor, kind: str) -> Tensor:
    return with_gradient(lambda x: algos.kl_penalty(x, ref.float(), kind), log_probs.float())


def rollout_weights(
    old: Tensor, rollout: Tensor, mask: Tensor, level: str, upper: float, lower: float | None
) -> Tensor:
    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
        (old - rollout).float(),
        mask.float(),
        rollout_is=level,
        rollout_is_threshold=upper if lower is None else f"{lower}_{upper}",
    )
    return weights


def rejection(
    old: Tensor, rollout: Tensor, mask: Tensor, criterion: str, bound: tuple[float, float]
) -> Tensor:
    kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        (old - rollout).float(),
        mask.float(),
        rollout_rs=criterion,
        rollout_rs_threshold=f"{bound[0]}_{bound[1]}",
    )
    return kept


def kept_loss(losses: Tensor, old: Tensor, rollout: Tensor, mask: Tensor, bound: float) -> Tensor:
    ratio = math.exp(-bound), math.exp(bound)
    kept = rejection(old, rollout, mask, "token_k1", ratio)
    weights = rollout_weights(old, rollout, mask, "token", 1e9, None)
    return algos.agg_loss(losses.float() * weights, kept, "token-mean")


def log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    # Its workers divide the logits by the temperature and call this.
    return torch_functional.logprobs_from_logits(logits.float() / temperature, ids)


def kept_log_probs(logits: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
    raise NotThere("no log-probs over a part of the vocabulary")


def tied_gradient(weight: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    head = FusedLinearForPPO()
    return with_gradient(lambda w: head(w[ids], w, labels)[0], weight.float())
