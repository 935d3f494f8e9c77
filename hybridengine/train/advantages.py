"""From outcomes of responses to what their tokens are trained by: rewards, advantages, weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.kernels import RolloutCorrection, rollout_correction, token_kl
from hybridengine.run.config.rl import AlgorithmConfig, RLConfig, RolloutCorrectionConfig
from hybridengine.train.algorithms import (
    NEEDS,
    AdvantageOptions,
    KLController,
    Responses,
    advantages,
)
from hybridengine.train.batch import DataParallel, RolloutBatch
from hybridengine.train.metrics import mean_max_min

_COV_KL_COEF = 0.1  # of kl_cov, verl's ppo_kl_coef
_MIN_MEAN_WEIGHT = 1e-8  # weights of a smaller mean are not normalised, as in verl
_CORRECTION_NAMES = {  # the kernel's -> verl's
    "is_weight_mean": "rollout_is_mean",
    "is_weight_max": "rollout_is_max",
    "is_clipped_fraction": "rollout_is_clipped_fraction",
    "rejected_fraction": "rollout_rs_masked_fraction",
}


class Rewards(NamedTuple):
    """What each trajectory earns, and where: float32."""

    per_trajectory: Tensor  # [M], of all replicas
    per_token: Tensor  # [R], of this replica


def compute_rewards(
    batch: RolloutBatch, dp: DataParallel, kl: KLController | None, algorithm: AlgorithmConfig
) -> tuple[Rewards, dict[str, float]]:
    """Compute rewards and their metrics: the score at the last token of each response. Collective.

    kl: subtract every token's KL penalty, and advance the controller of its coefficient. A
      trajectory of several responses has the penalties of all of its tokens.
    """
    outcomes, device = batch.outcomes, batch.index.device
    scores = outcomes.last.scores.float().to(device)
    per_token, metrics = torch.zeros_like(batch.rollout_log_probs), dict[str, float]()
    at_end = batch.per_response(outcomes.scores.float())
    turn_rewards = batch.columns.get("turn_rewards")
    if turn_rewards is not None:
        at_end = at_end - batch.sequence_sums(turn_rewards)
        per_token += turn_rewards
    per_token[batch.cu_seqlens[1:].long() - 1] += at_end
    rewards = Rewards(scores, per_token)
    if kl is not None:
        assert batch.old_log_probs is not None and batch.ref_log_probs is not None
        kl_R = token_kl(algorithm.kl_penalty, batch.old_log_probs, batch.ref_log_probs)
        if batch.sampled is not None:
            kl_R = kl_R.where(batch.sampled, 0)
        per_token -= kl.coef * kl_R
        kl_sums = dp.gather_responses(batch, batch.sequence_sums(kl_R))
        kl_sums = outcomes.sum_of_trajectories(kl_sums)
        num_tokens = outcomes.sum_of_trajectories(outcomes.num_sampled).to(device)
        mean_kl = float((kl_sums / num_tokens).mean())
        metrics["actor/reward_kl_penalty"] = mean_kl
        metrics["actor/reward_kl_penalty_coeff"] = kl.coef
        rewards = Rewards(scores - kl.coef * kl_sums, per_token)
        kl.update(mean_kl, len(scores))
    return rewards, metrics | mean_max_min("critic/rewards", rewards.per_trajectory)


def compute_advantages(
    batch: RolloutBatch, dp: DataParallel, rewards: Rewards, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Compute (advantages, returns), [R] each, by the configured estimator. Collective."""
    # A trajectory of several responses is one entry of the group's statistics.
    scores, local = rewards.per_trajectory, batch.per_response(batch.outcomes.trajectories)
    num_sampled = batch.outcomes.sum_of_trajectories(batch.outcomes.num_sampled)
    outcomes = batch.outcomes.last
    baselines, parts, weights = outcomes.optional("baseline"), None, None
    if "reward_parts" in NEEDS[algorithm.adv_estimator]:
        names = algorithm.gdpo_reward_keys or list(outcomes.parts)
        parts = torch.stack([outcomes.parts[name] for name in names], dim=1)
        of_score = [outcomes.weights[name] for name in names]
        weights = tuple(algorithm.gdpo_reward_weights or of_score)
    responses = Responses(
        rewards=scores,
        group_ids=outcomes.groups.to(scores.device),
        cu_seqlens=batch.cu_seqlens,
        response_mask=batch.response_mask,
        token_rewards=rewards.per_token,
        lengths=num_sampled.to(scores.device),
        local=local,
        values=batch.values,
        reward_baselines=None if baselines is None else baselines.to(scores),
        reward_parts=None if parts is None else parts.to(scores),
    )
    options = AdvantageOptions(
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        part_weights=weights,
        process_group=dp.group,
    )
    return advantages(algorithm.adv_estimator, responses, options)


def correct_batch(
    batch: RolloutBatch, dp: DataParallel, options: RolloutCorrectionConfig
) -> RolloutCorrection:
    """Correct for the gap between the engine's log-probs and batch.old_log_probs. Collective.

    Returns (importance weights [R], response mask after rejection, metrics by verl's names).
    """
    old, mask = batch.old_log_probs, batch.response_mask
    assert old is not None
    num_tokens = mask.sum()
    dist.all_reduce(num_tokens, group=dp.group)
    rollout, ends = batch.rollout_log_probs, batch.cu_seqlens
    correction = correct(old, rollout, ends, mask, num_tokens, options)
    metrics, weights = dp.reduce_metrics([correction.metrics]), correction.weights
    if options.rollout_is_batch_normalize:
        assert weights is not None
        share = mask.to(weights.dtype)
        if options.rollout_is != "token":
            share = share / batch.sequence_sums(share)[batch.sequence_ids].clamp(min=1)
        total = torch.stack([(weights * share).sum(), share.sum()])
        dist.all_reduce(total, group=dp.group)
        mean = total[0] / total[1].clamp(min=1)  # over all tokens, or over all responses
        mean = torch.where(mean > _MIN_MEAN_WEIGHT, mean, 1.0)
        weights = weights / mean
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean
    return correction._replace(weights=weights, metrics=metrics)


def correct(
    own: Tensor,
    rollout: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    num_tokens: Tensor,
    options: RolloutCorrectionConfig,
) -> RolloutCorrection:
    """Compare log-probs of the trainer, `own`, with the engine's, [T] each.

    mask: bool [T], the tokens that are trained on.
    num_tokens: of the mini-batch on all ranks, the denominator of the metrics.
    """
    lower, upper = options.is_bounds
    correction = rollout_correction(
        own,
        rollout,
        cu_seqlens=cu_seqlens,
        response_mask=mask,
        rollout_is=options.rollout_is,
        rollout_is_threshold=upper,
        rollout_is_lower=lower,
        rejection=options.rejection,
        global_num_tokens=num_tokens,
    )
    named = {
        f"rollout_corr/{_CORRECTION_NAMES.get(name, name)}": value
        for name, value in correction.metrics.items()
    }
    return correction._replace(metrics=named)


@dataclass(frozen=True)
class LossOptions:
    """The keyword arguments of `policy_loss`: those of the run, then those of a micro-batch.

    Tensors per token are [r].
    """

    loss_mode: str
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float | None
    loss_agg_mode: str
    loss_scale_factor: float
    kl_type: str
    entropy_coeff: float
    cov_kl_coef: float = _COV_KL_COEF
    old_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    response_mask: Tensor | None = None
    selected: Tensor | None = None
    cu_seqlens: Tensor | None = None
    global_num_tokens: Tensor | None = None
    global_num_seqs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    kl_coef: float = 0.0
    rollout_is_weights: Tensor | None = None

    @staticmethod
    def of(config: RLConfig) -> LossOptions:
        """Return the options of a run."""
        actor, low_high = config.actor, config.clip_ratios
        reinforces = config.algorithm.rollout_correction.loss_type == "reinforce"
        return LossOptions(
            "gpg" if reinforces else actor.policy_loss.loss_mode,
            *low_high,
            actor.clip_ratio_c,
            actor.loss_agg_mode,
            config.data.max_response_length,
            actor.kl_loss_type,
            actor.entropy_coeff,
        )
