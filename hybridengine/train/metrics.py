"""Metrics of a step, reduced over all replicas in float64, and results of a validation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.run.errors import RolloutError
from hybridengine.train.batch import RolloutBatch
from hybridengine.train.rollouts import Outcomes, Rollouts

# (data source; by variable, the results of its responses; the answers they give, or None)
Problem = tuple[str, Mapping[str, Sequence[float]], Sequence[float] | None]


def batch_metrics(batch: RolloutBatch, group: dist.ProcessGroup | None) -> dict[str, float]:
    """Summarize scores, advantages, returns, values, lengths and further results of the reward.

    group: one rank of every replica (`DataParallel.group`). Collective.
    """
    outcomes = batch.outcomes.last
    num_sampled = batch.outcomes.sum_of_trajectories(batch.outcomes.num_sampled)
    pairs = set(zip(outcomes.groups.tolist(), outcomes.scores.tolist(), strict=True))
    num_scores = Counter(group for group, _ in pairs)
    per_token = {
        "critic/advantages": batch.advantages,
        "critic/returns": batch.returns,
        "critic/values": batch.values,
        "num_kept": batch.columns.get("num_kept"),
    }
    rewards = {**outcomes.extras, **outcomes.counts}
    return {
        **mean_max_min("critic/score", outcomes.scores),
        **_mean_max_min_over_ranks(
            {name: _counted(batch, x) for name, x in per_token.items() if x is not None}, group
        ),
        **mean_max_min("response_length", num_sampled),
        **mean_max_min("prompt_length", batch.outcomes.first.prompt_lengths),
        "response_length/clip_ratio": float(outcomes.is_truncated.double().mean()),
        "frac_reward_zero_std": fmean(number == 1 for number in num_scores.values()),
        **{f"reward/{name}": float(values.mean()) for name, values in rewards.items()},
        **turn_metrics(outcomes),
    }


def turn_metrics(outcomes: Outcomes) -> dict[str, float]:
    """Summarize the numbers of trajectories of several turns; verl's names where it has them."""
    metrics: dict[str, float] = {}
    for name, values in outcomes.turns.items():
        if name in ("num_turns", "timing_s/agent_loop/tool_calls"):
            metrics |= mean_max_min(name, values)
        else:
            metrics[f"agent_loop/{name}"] = float(values.mean())
    return metrics


def performance_metrics(
    num_tokens: int, seconds: float, world_size: int, device: torch.device
) -> dict[str, float]:
    """Return the metrics of a step in which all ranks together processed `num_tokens` tokens."""
    metrics = {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / seconds / world_size,
        "perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 2**30,
    }
    if device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return metrics


def mean_max_min(name: str, values: Tensor) -> dict[str, float]:
    """Mean, maximum and minimum of `values` as <name>/mean and so on."""
    numbers = {"mean": values.double().mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{kind}": float(value) for kind, value in numbers.items()}


def probs_diff(
    batch: RolloutBatch, group: dist.ProcessGroup | None, same: Tensor | None = None
) -> dict[str, float]:
    """Compare the engine's probabilities with the trainer's of the same tokens. Collective.

    Names are verl's. A mean below 0.005 is healthy; above 0.01 engine and trainer run different
    models. The mean ratio is of the trainer's to the engine's probability: 1 where both are over
    the same vocabulary entries, and what the trainer gives to the engine's entries otherwise. What
    has no value is left out: all where no token is trained on, the correlation of equal numbers.

    same: bool [R], the tokens whose log-probs must be equal; None: none must. RolloutError on every
        rank if one is not.
    """
    assert batch.old_log_probs is not None
    p, q = (
        x[batch.response_mask].double().exp()
        for x in (batch.old_log_probs, batch.rollout_log_probs)
    )
    diff, ratio = (p - q).abs(), p / q
    count, sum_p, sum_q, sum_diff, sum_ratio = _sum_over_ranks(
        torch.stack([torch.ones_like(p), p, q, diff, ratio]).sum(1), group
    )
    wrong = diff[:0] if same is None else diff[same[batch.response_mask]]
    largest, of_same = found = torch.stack([_max(diff), _max(wrong)]).clamp(min=0)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    if of_same != 0:  # also where it is NaN
        raise RolloutError(
            "rollout.exact: the engine's log-probs are not the trainer's (a probability differs by "
            f"{float(of_same):.1e}), so the responses are not of the trained weights, or an "
            "operator is not exact. `hybridengine parity` on this run names the first difference; "
            "rollout.exact=off goes on without the check"
        )
    if count == 0:
        return {}
    p, q = p - sum_p / count, q - sum_q / count
    pp, qq, pq = _sum_over_ranks(torch.stack([p * p, q * q, p * q]).sum(1), group)
    correlation = float((pq / (pp * qq).sqrt()).clamp(-1, 1))
    metrics = {
        "training/rollout_probs_diff_mean": float(sum_diff / count),
        "training/rollout_probs_diff_max": float(largest),
        "training/rollout_ratio_mean": float(sum_ratio / count),
    }
    if not math.isnan(correlation):
        metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return metrics


def explained_variance(batch: RolloutBatch, group: dist.ProcessGroup | None) -> float:
    """Compute 1 - var(returns - values) / var(returns) over all tokens. Collective."""
    assert batch.values is not None and batch.returns is not None
    both = torch.stack([batch.returns - batch.values, batch.returns]).double()
    both = _counted(batch, both.T).T
    sums = _sum_over_ranks(torch.stack([*both.sum(1), both.new_tensor(both.size(1))]), group)
    mean = sums[:2] / sums[2]
    residual, variance = _sum_over_ranks((both - mean[:, None]).square().sum(1), group) / sums[2]
    return float(1 - residual / variance.clamp(min=1e-8))


def _counted(batch: RolloutBatch, per_token: Tensor) -> Tensor:
    """Return what this replica adds to a statistic over all tokens: nothing if it is a dummy."""
    if batch.is_dummy:
        return per_token[:0]
    return per_token if batch.sampled is None else per_token[batch.sampled]


def _sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    dist.all_reduce(values, group=group)
    return values


def _max(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_tensor(-torch.inf)


def _mean_max_min_over_ranks(
    values: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Compute `mean_max_min` of several tensors [T] over all ranks."""
    tensors = [x.double() for x in values.values()]
    sums = torch.stack([torch.stack([x.sum(), x.new_tensor(x.numel())]) for x in tensors])
    limits = torch.stack([torch.stack([_max(x), _max(-x)]) for x in tensors])
    dist.all_reduce(sums, group=group)
    dist.all_reduce(limits, dist.ReduceOp.MAX, group=group)
    metrics: dict[str, float] = {}
    for name, (total, count), (largest, smallest) in zip(
        values, sums.tolist(), limits.tolist(), strict=True
    ):
        metrics |= {f"{name}/mean": total / count, f"{name}/max": largest, f"{name}/min": -smallest}
    return metrics


def problems_of(rollouts: Rollouts) -> list[Problem]:
    """Return the results of each prompt's responses, from the outcomes alone."""
    outcomes = rollouts.outcomes.last
    counts = outcomes.groups.bincount(minlength=len(rollouts.prompts))
    preds = outcomes.optional("pred")
    rows_of = torch.arange(len(outcomes)).split(counts.tolist())
    return [
        (
            prompt.data_source,
            {name: values[rows].tolist() for name, values in outcomes.results.items()},
            None if preds is None else preds[rows].tolist(),
        )
        for prompt, rows in zip(rollouts.prompts, rows_of, strict=True)
    ]
