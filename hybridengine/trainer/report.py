"""What a run shows and leaves behind; only rank 0 writes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from types import TracebackType

import torch
from rich.console import Console

from hybridengine.config import GRPOConfig, config_to_yaml
from hybridengine.data import PromptDataset
from hybridengine.distributed import Session
from hybridengine.reshard import ReshardPlan
from hybridengine.tracking import (
    MetricsLogger,
    Progress,
    RolloutWriter,
    accuracy_interval,
    gain_interval,
    performance_metrics,
    plot_learning_curves,
    write_summary,
)
from hybridengine.trainer.batching import Batch
from hybridengine.trainer.plan import plan_table
from hybridengine.trainer.rollouts import Rollout

__all__ = ["Reporter", "spread", "step_metrics"]


def step_metrics(
    batch: Batch, session: Session, timings: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Metrics of one step that follow from its batch and timings, by their dashboard names."""
    rollouts = batch.rollouts
    clipped = [r.finish_reason == "length" for r in rollouts]
    tokens = sum(r.num_tokens for r in rollouts)
    by_group: dict[int, set[float]] = {}
    for r in rollouts:
        by_group.setdefault(r.group, set()).add(r.score)
    metrics = {
        **spread("critic/score", torch.tensor([r.score for r in rollouts])),
        **spread("critic/advantages", batch.advantages),
        **spread("critic/returns", batch.returns),
        **spread("response_length", batch.cu_seqlens.diff()),
        **spread("prompt_length", torch.tensor([len(r.sample.prompt_ids) for r in rollouts])),
        "response_length/clip_ratio": fmean(clipped),
        "frac_reward_zero_std": fmean(len(s) == 1 for s in by_group.values()),
        **{f"timing_s/{name}": t for name, t in timings.items()},
        "timing_s/step": seconds,
        **performance_metrics(tokens, seconds, session.world_size, session.device),
    }
    if batch.values is not None:
        metrics |= spread("critic/values", batch.values)
    for name in rollouts[0].extras:
        metrics[f"reward/{name}"] = fmean(r.extras[name] for r in rollouts)
    return metrics


def spread(name: str, values: torch.Tensor | None) -> dict[str, float]:
    """Mean, maximum and minimum of `values` under `name`."""
    assert values is not None
    of = {"mean": values.double().mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{kind}": float(value) for kind, value in of.items()}


_SHOWN = 3


class Reporter:
    """Console, metric files, rollouts, curves and summary of one run."""

    def __init__(
        self, config: GRPOConfig, session: Session, total_steps: int, first_step: int = 0
    ) -> None:
        self._config, self._session, self._steps = config, session, total_steps
        self._dir = Path(config.trainer.default_local_dir)
        # Validation results by name (score and the reward's extras), per problem, in order.
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, list[float]] = {}
        self._probs_diff: list[float] = []
        self._shown = False
        if not session.is_main:
            return
        self._dir.mkdir(parents=True, exist_ok=True)
        (self._dir / "config.yaml").write_text(config_to_yaml(config))
        self._console = Console()
        if first_step:
            self._console.print(f"resumed after step {first_step}")
        self._logger = MetricsLogger(
            self._dir,
            config.trainer.logger,
            total_steps=total_steps,
            console=self._console,
            first_step=first_step,
            project=config.trainer.project_name,
            experiment=config.trainer.experiment_name,
            config=asdict(config),
        )
        self._progress = Progress(total_steps - first_step, console=self._console)
        self._rollouts = RolloutWriter(config.trainer.rollout_data_dir or self._dir / "rollouts")

    def __enter__(self) -> Reporter:
        if self._session.is_main:
            self._progress.__enter__()
            self._session.on_phase = lambda phase: self._progress.enter(phase, self._session.step)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session.is_main:
            self._progress.__exit__(kind, error, trace)
            self._logger.close()

    def plan(
        self, plan: ReshardPlan, train: PromptDataset, val: PromptDataset | None, engine: str
    ) -> None:
        """Print what the configuration amounts to."""
        if not self._session.is_main:
            return
        mib = 2.0**20
        table = plan_table(self._config, train, val)
        table.add_row(
            "[bold]weight sync",
            f"into {engine}: {max(plan.bytes_received) / mib:.1f} MiB received per rank and step "
            f"(lower bound {max(plan.lower_bound) / mib:.1f}), {len(plan.buckets)} buckets of "
            f"up to {plan.staging_bytes / mib:.1f} MiB",
        )
        if plan.fallback:
            table.add_row("[bold]gathered whole", ", ".join(plan.fallback))
        self._console.print(table)

    def step(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout]) -> None:
        self._probs_diff.append(metrics["training/rollout_probs_diff_mean"])
        if not self._session.is_main:
            return
        self._logger.log(step, metrics)
        self._write(f"step_{step}", rollouts)
        self._progress.finish_step(sum(r.num_tokens for r in rollouts))

    def validation(self, step: int, rollouts: Sequence[Rollout], seconds: float) -> None:
        """Log the mean score and each extra of the reward over the held-out problems."""
        results = {"score": _per_problem(rollouts, [r.score for r in rollouts])}
        for name in rollouts[0].extras:
            results[name] = _per_problem(rollouts, [r.extras[name] for r in rollouts])
        self._first = self._first or results
        self._last = results
        if self._session.is_main:
            means = {f"val/{name}": fmean(values) for name, values in results.items()}
            self._logger.log(step, means | {"timing_s/testing": seconds})
            self._write(f"val_{step}", rollouts)

    def saved(self, step: int, seconds: float) -> None:
        if self._session.is_main:
            self._logger.log(step, {"timing_s/save_checkpoint": seconds})

    def _write(self, name: str, rollouts: Sequence[Rollout]) -> None:
        self._show_first(rollouts)
        extras = rollouts[0].extras
        self._rollouts.write(
            name,
            [r.sample for r in rollouts],
            [r.response_text for r in rollouts],
            [r.response_ids for r in rollouts],
            [r.score for r in rollouts],
            [r.log_probs for r in rollouts],
            {key: [r.extras[key] for r in rollouts] for key in extras},
        )

    def _show_first(self, rollouts: Sequence[Rollout]) -> None:
        """Once, before anything is learnt: what the reward makes of three responses."""
        if self._shown:
            return
        self._shown = True
        apart = max(1, len(rollouts) // _SHOWN)
        for r in rollouts[::apart][:_SHOWN]:
            extras = "".join(f", {name} {value:g}" for name, value in r.extras.items())
            self._console.print(
                f"scored sample: prompt {r.sample.prompt_text[-200:]!r}\n"
                f"  response {r.response_text[:300]!r}, ground truth {r.sample.ground_truth!r}\n"
                f"  score {r.score:g}{extras}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def finish(self, facts: Mapping[str, object]) -> None:
        """Curves, summary.json and the last words on the screen."""
        if not self._session.is_main:
            return
        summary = dict(facts)
        for name, start in self._first.items():
            end = self._last[name]
            summary[f"val_{name}_start"], summary[f"val_{name}_end"] = fmean(start), fmean(end)
            summary[f"val_{name}_gain_ci95"] = list(gain_interval(start, end)[1:])
            if set(start) | set(end) <= {0.0, 1.0}:
                summary[f"val_{name}_start_ci95"] = list(
                    accuracy_interval(fmean(start), len(start))
                )
                summary[f"val_{name}_end_ci95"] = list(accuracy_interval(fmean(end), len(end)))
        if self._first:
            summary["val_problems"] = len(self._first["score"])
        if self._probs_diff:  # none of a run resumed at its end
            summary["rollout_probs_diff_mean_first"] = self._probs_diff[0]
            summary["rollout_probs_diff_mean_max"] = max(self._probs_diff)
        trainer = self._config.trainer
        title = f"{trainer.project_name}: {trainer.experiment_name}"
        plot_learning_curves(self._logger.history, self._dir / "curves.png", title=title)
        write_summary(self._dir / "summary.json", summary)
        self._say(summary)

    def _say(self, summary: Mapping[str, object]) -> None:
        for name, start in self._first.items():
            gain, low, high = gain_interval(start, self._last[name])
            verdict = "" if low > 0 else "  (not larger than the sampling error)"
            self._console.print(
                f"held-out {name}: {fmean(start):.3f} → {fmean(self._last[name]):.3f}, "
                f"gain {gain:+.3f}, 95% interval [{low:+.3f}, {high:+.3f}] "
                f"over {len(start)} problems{verdict}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        files = ("summary.json", "curves.png", "metrics.jsonl", "rollouts", "final")
        there = [f for f in files if (self._dir / f).exists() or f == "summary.json"]
        self._console.print(
            f"{summary['steps']} steps in {summary['seconds']} s; "
            f"see {self._dir}{os.sep}{{{','.join(there)}}}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _per_problem(rollouts: Sequence[Rollout], values: Sequence[float]) -> list[float]:
    """Mean over the responses of each problem, in the order of the problems."""
    by_problem: dict[int, list[float]] = {}
    for rollout, value in zip(rollouts, values, strict=True):
        by_problem.setdefault(rollout.sample.index, []).append(value)
    return [fmean(v) for v in by_problem.values()]
