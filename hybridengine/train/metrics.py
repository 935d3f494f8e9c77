"""Metrics of a step, reduced over all replicas in float64, and of a validation.

A validation has verl's names per data source: `val-core/<source>/<variable>/mean@N`,
`best@N/mean` and `maj@N/mean` of the variable that counts ("acc" if the reward gives it, else
"reward"), N responses to a problem; everything else is `val-aux/…`. As in verl
(`process_validation_metrics`), best@n, worst@n and maj@n stand for n draws with replacement from
the N responses. Here best and worst are the exact expectations of that, not estimates from 1,000
draws; votes are counted over "pred", an answer that the reward may return.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, pstdev, stdev
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.run.errors import RolloutError
from hybridengine.train.batch import RolloutBatch
from hybridengine.train.rollouts import Outcomes, Rollouts

_CORE = "val-core/"
_DRAWS = 1000  # of n responses, for a majority vote
_Z95 = NormalDist().inv_cdf(0.975)  # two-sided 95%

# (data source; by variable, the results of its responses; the answers they give, or None)
Problem = tuple[str, Mapping[str, Sequence[float]], Sequence[float] | None]


def batch_metrics(batch: RolloutBatch, group: dist.ProcessGroup | None) -> dict[str, float]:
    """Summarize scores, advantages, returns, values, lengths and further results of the reward.

    group: one rank of every replica (`DataParallel.group`). Collective.
    """
    outcomes = batch.outcomes.last
    num_sampled = batch.outcomes.sum_of_trajectories(batch.outcomes.num_sampled)
    scores_by_group: dict[int, set[float]] = {}
    for number, score in zip(outcomes.groups.tolist(), outcomes.scores.tolist(), strict=True):
        scores_by_group.setdefault(number, set()).add(score)
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
        "frac_reward_zero_std": fmean(len(scores) == 1 for scores in scores_by_group.values()),
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


def mean_max_min(name: str, values: Tensor) -> dict[str, float]:
    """Mean, maximum and minimum of `values` as <name>/mean and so on."""
    numbers = {"mean": values.double().mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{kind}": float(value) for kind, value in numbers.items()}


def probs_diff(
    batch: RolloutBatch, group: dist.ProcessGroup | None, exact: bool = False
) -> dict[str, float]:
    """Compare the engine's probabilities with the trainer's of the same tokens. Collective.

    Names are verl's. A mean below 0.005 is healthy; above 0.01 engine and trainer run different
    models. The mean ratio is of the trainer's to the engine's probability: 1 where both are over
    the same vocabulary entries, and what the trainer gives to the engine's entries otherwise. What
    has no value is left out: all where no token is trained on, the correlation of equal numbers.

    Raises:
        RolloutError: with `exact`, on every rank, if the log-probs of any token are not equal.
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
    largest = _max(diff).clamp(min=0)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    if exact and largest != 0:  # also where it is NaN
        raise RolloutError(
            "rollout.exact: the engine's log-probs are not the trainer's (a probability differs by "
            f"{float(largest):.1e}), so the responses are not of the trained weights, or an "
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


class ValidationHistory:
    """Results per problem of the first and the last validation.

    A checkpoint keeps both, so that a resumed run compares with the start of the whole run. After
    one validation alone there is nothing to compare, and no start and gain.
    """

    def __init__(self) -> None:
        self._count = 0  # of validations
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, list[float]] = {}
        self._core: dict[str, list[float]] = {}  # [first, last] value of each val-core metric

    def add(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Add a validation; return val/<result>, means over problems, and verl's per source."""
        self._last = {
            name: [fmean(results[name]) for _, results, _ in problems] for name in problems[0][1]
        }
        self._first, self._count = self._first or self._last, self._count + 1
        per_source = source_metrics([_with_verl_names(problem) for problem in problems])
        for name, value in per_source.items():
            if name.startswith(_CORE):
                first, *_ = self._core.get(name, [value])
                self._core[name] = [first, value]
        return {f"val/{name}": fmean(values) for name, values in self._last.items()} | per_source

    def state_dict(self) -> dict[str, Any]:
        counted = {"first": self._first, "last": self._last, "core": self._core}
        return {**counted, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first, self._last, self._core = state["first"], state["last"], state["core"]
        self._count = state.get("count", 2)  # of older checkpoints

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json: start, end and gain with 95% intervals."""
        summary: dict[str, Any] = {}
        for name, start in self._first.items():
            ends = {"start": start, "end": self._last[name]}
            if self._count > 1:
                interval = gain_interval(start, ends["end"])[1:]
                summary[f"val_{name}_gain_ci95"] = list(interval)
            else:
                del ends["start"]
            summary |= {f"val_{name}_{when}": fmean(values) for when, values in ends.items()}
            if {x for values in ends.values() for x in values} <= {0.0, 1.0}:
                for when, values in ends.items():
                    interval = accuracy_interval(fmean(values), len(values))
                    summary[f"val_{name}_{when}_ci95"] = list(interval)
            summary["val_problems"] = len(start)
        if self._core and self._count > 1:
            summary["val_core_start_end"] = {
                name.removeprefix(_CORE): pair for name, pair in self._core.items()
            }
        return summary

    def lines(self) -> list[str]:
        """Return one line per result for the console."""
        lines = []
        for name, start in self._first.items():
            if self._count == 1:
                lines.append(
                    f"validation {name}: {fmean(start):.3f} over {len(start)} problems, measured "
                    "once; trainer.val_before_train=true measures the start, too"
                )
                continue
            gain, low, high = gain_interval(start, self._last[name])
            verdict = "" if low > 0 else "  (not larger than the sampling error)"
            lines.append(
                f"validation {name}: {fmean(start):.3f} → {fmean(self._last[name]):.3f}, "
                f"gain {gain:+.3f}, 95% interval [{low:+.3f}, {high:+.3f}] "
                f"over {len(start)} problems{verdict}"
            )
        return lines


def problems_of(rollouts: Rollouts) -> list[Problem]:
    """Return the results of each prompt's responses, from the outcomes alone."""
    outcomes = rollouts.outcomes.last
    counts = outcomes.groups.bincount(minlength=len(rollouts.prompts))
    rows_of = torch.arange(len(outcomes)).split(counts.tolist())
    return [
        (
            prompt.data_source,
            {name: values[rows].tolist() for name, values in outcomes.results.items()},
            None if outcomes.preds is None else outcomes.preds[rows].tolist(),
        )
        for prompt, rows in zip(rollouts.prompts, rows_of, strict=True)
    ]


def _with_verl_names(problem: Problem) -> Problem:
    source, results, preds = problem
    names = {"score": "reward"}
    return source, {names.get(name, name): values for name, values in results.items()}, preds


def source_metrics(problems: Sequence[Problem]) -> dict[str, float]:
    """Compute the metrics of each data source, means over its problems."""
    by_source: dict[str, list[Problem]] = {}
    for problem in problems:
        by_source.setdefault(problem[0], []).append(problem)
    metrics: dict[str, float] = {}
    for source, group in by_source.items():
        names = group[0][1]
        core = "acc" if "acc" in names else "reward"
        for name in names:
            per_problem = [_problem_metrics(results[name], preds) for _, results, preds in group]
            largest_n = max(len(results[name]) for _, results, _ in group)
            for kind in per_problem[0]:
                mean = fmean(metric[kind] for metric in per_problem if kind in metric)
                section = _section(kind, largest_n, name == core)
                metrics[f"{section}/{source}/{name}/{kind}"] = mean
    return metrics


def _section(kind: str, largest_n: int, is_core: bool) -> str:
    """kind: such as best@4/mean."""
    head, _, n = kind.partition("/")[0].partition("@")
    core = is_core and head in ("mean", "best", "maj") and int(n) == largest_n
    return "val-core" if core else "val-aux"


def _problem_metrics(values: Sequence[float], preds: Sequence[float] | None) -> dict[str, float]:
    largest_n = len(values)
    metrics = {f"mean@{largest_n}": fmean(values)}
    if largest_n > 1:
        metrics[f"std@{largest_n}"] = pstdev(values)
    powers = {1 << k for k in range(largest_n.bit_length())}
    for n in sorted({*powers, largest_n} - {1}):
        metrics[f"best@{n}/mean"] = expected_best(values, n)
        metrics[f"worst@{n}/mean"] = -expected_best([-value for value in values], n)
        if preds is not None:
            metrics[f"maj@{n}/mean"] = expected_majority(values, preds, n)
    return metrics


def expected_best(values: Sequence[float], n: int) -> float:
    """Compute the expected maximum of n draws with replacement from `values`."""
    cdf = np.linspace(0, 1, len(values) + 1) ** n
    return float(np.sort(np.asarray(values, np.float64)) @ np.diff(cdf))


def expected_majority(values: Sequence[float], preds: Sequence[float], n: int) -> float:
    """Estimate the expected value of the majority answer among n drawn responses.

    values[i]: the score of response i; preds[i]: the answer it gives. On a tie the answer drawn
    first counts.
    """
    _, answers = np.unique(np.asarray(preds, np.float64), return_inverse=True)
    seed = zlib.crc32(f"{len(values)} {n}".encode())
    drawn = np.random.default_rng(seed).integers(len(values), size=(_DRAWS, n))
    votes = answers[drawn]
    same = votes[:, :, None] == votes[:, None, :]
    winner = same.sum(2).argmax(1)  # the first of the most frequent
    return float(np.asarray(values, np.float64)[drawn[np.arange(_DRAWS), winner]].mean())


def accuracy_interval(accuracy: float, n: int) -> tuple[float, float]:
    """Return the 95% interval of an accuracy measured on `n` problems (Wilson 1927)."""
    spread = _Z95**2 / n
    centre = (accuracy + spread / 2) / (1 + spread)
    half = _Z95 / (1 + spread) * math.sqrt(accuracy * (1 - accuracy) / n + spread / (4 * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def gain_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Return (gain, low, high): the mean of `after - before` and its 95% interval.

    Problems are paired, so only changes contribute to the variance (normal approximation).
    """
    gains = [b - a for a, b in zip(before, after, strict=True)]
    mean, n = fmean(gains), len(gains)
    half = _Z95 * (stdev(gains) if n > 1 else 0.0) / math.sqrt(n)
    return mean, mean - half, mean + half
