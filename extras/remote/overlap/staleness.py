"""How old the weights are that sampled a batch's tokens; names as verl's fully_async_policy."""

from __future__ import annotations

from hybridengine.engine.response import Response
from hybridengine.train.rollouts import Rollouts

__all__ = ["staleness_metrics"]


def staleness_metrics(version: int, rollouts: Rollouts) -> dict[str, float]:
    """Return how many updates the tokens of `rollouts` are older than `version`. Collective.

    mean: of the responses, each the mean of its sampled tokens. max: of the oldest token. partial:
    responses whose tokens are of several versions.
    """
    means = rollouts.gather_numbers([version - _mean_version(r) for r in rollouts.own])
    newest = rollouts.gather_numbers([max(v for v, _ in r.versions) for r in rollouts.own])
    oldest = rollouts.outcomes.versions
    spans = newest - oldest
    num_partial = int((spans > 0).sum())
    return {
        "fully_async/trajectory_staleness/mean": float(means.mean()),
        "fully_async/trajectory_staleness/max": float(version - oldest.min()),
        "fully_async/partial/total_partial_num": num_partial,
        "fully_async/partial/partial_ratio": num_partial / len(spans),
        "fully_async/partial/max_partial_span": float(spans.max()),
    }


def _mean_version(response: Response) -> float:
    runs = response.versions
    return sum(version * count for version, count in runs) / sum(count for _, count in runs)
