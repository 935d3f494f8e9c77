"""From the outcomes of all responses to rewards and advantages of the tokens of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridengine.kernels import token_kl
from hybridengine.run.config.rl import AlgorithmConfig
from hybridengine.train.algorithms import (
    NEEDS,
    AdvantageOptions,
    KLController,
    Responses,
    advantages,
)
from hybridengine.train.batch import DataParallel, RolloutBatch
from hybridengine.train.metrics import mean_max_min
from hybridengine.train.outcomes import Outcomes


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
    batch: RolloutBatch,
    dp: DataParallel,
    rewards: Rewards,
    algorithm: AlgorithmConfig,
    baselines: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute (advantages, returns), [R] each, by the configured estimator. Collective.

    baselines: [N], the reward of the greedy response to the prompt, for estimators that need it.
    """
    # A trajectory of several responses is one entry of the group's statistics.
    scores, local = rewards.per_trajectory, batch.per_response(batch.outcomes.trajectories)
    num_sampled = batch.outcomes.sum_of_trajectories(batch.outcomes.num_sampled)
    if baselines is not None and batch.outcomes.is_last is not None:
        baselines = baselines[batch.outcomes.is_last]
    outcomes = batch.outcomes.last
    parts, weights = None, None
    if "reward_parts" in NEEDS[algorithm.adv_estimator]:
        names, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
        parts, weights = reward_parts(outcomes, names, weights)
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


def reward_parts(
    outcomes: Outcomes, names: Sequence[str], weights: Sequence[float] | None
) -> tuple[Tensor, tuple[float, ...]]:
    """Return the rewards that gdpo normalises separately: (scores [N, K], their weights).

    names: declared rewards (algorithm.gdpo_reward_keys); none: all.
    weights: one per name; None: those of the score (reward.weights).
    """
    names = names or list(outcomes.parts)
    scores = torch.stack([outcomes.parts[name] for name in names], dim=1)
    return scores, tuple(weights or [outcomes.weights[name] for name in names])
