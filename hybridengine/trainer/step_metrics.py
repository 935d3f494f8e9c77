"""Metrics of one step that follow from its batch, by their dashboard names."""

from __future__ import annotations

from statistics import fmean

import torch
from torch import Tensor

from hybridengine.trainer.batching import Batch

__all__ = ["probs_diff", "spread", "step_metrics"]


def step_metrics(batch: Batch) -> dict[str, float]:
    rollouts = batch.rollouts
    by_group: dict[int, set[float]] = {}
    for r in rollouts:
        by_group.setdefault(r.group, set()).add(r.score)
    metrics = {
        **spread("critic/score", torch.tensor([r.score for r in rollouts])),
        **spread("critic/advantages", batch.advantages),
        **spread("critic/returns", batch.returns),
        **spread("critic/values", batch.values),
        **spread("response_length", batch.cu_seqlens.diff()),
        **spread("prompt_length", torch.tensor([len(r.sample.prompt_ids) for r in rollouts])),
        "response_length/clip_ratio": fmean(r.finish_reason == "length" for r in rollouts),
        "frac_reward_zero_std": fmean(len(scores) == 1 for scores in by_group.values()),
    }
    for name in rollouts[0].extras:
        metrics[f"reward/{name}"] = fmean(r.extras[name] for r in rollouts)
    return metrics


def spread(name: str, values: Tensor | None) -> dict[str, float]:
    """Mean, maximum and minimum of `values` under `name`; nothing of None."""
    if values is None:
        return {}
    of = {"mean": values.double().mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{kind}": float(value) for kind, value in of.items()}


def probs_diff(batch: Batch) -> dict[str, float]:
    """How far the engine's probabilities are from the trainer's on the same tokens.

    Names as verl's: a mean below 0.005 is healthy, above 0.01 the two run different models.
    """
    assert batch.old_log_probs is not None
    mask = batch.response_mask
    p = batch.old_log_probs[mask].double().exp()
    q = batch.rollout_log_probs[mask].double().exp()
    gap, both = (p - q).abs(), torch.stack([p, q])
    correlation = torch.corrcoef(both)[0, 1] if p.numel() > 1 else p.new_tensor(1.0)
    return {
        "training/rollout_probs_diff_mean": float(gap.mean()) if p.numel() else 0.0,
        "training/rollout_probs_diff_max": float(gap.max()) if p.numel() else 0.0,
        "training/rollout_actor_probs_pearson_corr": float(correlation.nan_to_num(1.0)),
    }
