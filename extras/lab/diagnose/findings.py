"""What the files of a run say about it: a table of its time, and its problems in plain words.

Every threshold is in `THRESHOLDS`, and docs/lab.md explains them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from hybridengine.run.errors import ConfigError

_OF_ONE_RUN = ("seed", "trainer.default_local_dir", "trainer.rollout_data_dir")


@dataclass(frozen=True)
class LoggedRun:
    """A run's folder with metrics.jsonl, and config.yaml where it is there."""

    folder: Path

    @cached_property
    def rows(self) -> list[dict[str, float]]:
        """The rows of metrics.jsonl, those of one step joined; without values that are null."""
        file = self.folder / "metrics.jsonl"
        if not file.is_file():
            raise ConfigError(
                f"{file} does not exist; give the folder of a run whose trainer.logger has jsonl"
            )
        steps = dict[int, dict[str, float]]()
        for line in file.read_text().splitlines():
            try:
                row = json.loads(line)
                values = {name: x for name, x in row.items() if x is not None}
                steps.setdefault(row["step"], {}).update(values)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # a line that a crash has left incomplete
        if not steps:
            raise ConfigError(f"{file} has no metrics: no step of the run is finished")
        return [steps[step] for step in sorted(steps)]

    def series(self, metric: str) -> dict[int, float]:
        """Return the finite values of a metric by step."""
        found = ((int(row["step"]), row.get(metric, math.nan)) for row in self.rows)
        return {step: value for step, value in found if math.isfinite(value)}

    @cached_property
    def parity(self) -> dict[str, Any]:
        """What `hybridengine parity` on the run has found; {} if it was not called."""
        file = self.folder / "parity.json"
        return json.loads(file.read_text()) if file.is_file() else {}

    @cached_property
    def _all_settings(self) -> dict[str, Any]:
        file = self.folder / "config.yaml"
        if not file.is_file():
            return {"folder": str(self.folder)}
        from omegaconf import OmegaConf

        return _flat(OmegaConf.to_container(OmegaConf.load(file)))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by their dotted keys, those of one run, such as its seed, left out."""
        return {k: value for k, value in self._all_settings.items() if k not in _OF_ONE_RUN}

    @property
    def rollouts(self) -> Path:
        """The folder of its rollout files."""
        return Path(self._all_settings.get("trainer.rollout_data_dir") or self.folder / "rollouts")

    @property
    def name(self) -> str:
        return str(self.settings.get("trainer.experiment_name") or self.folder.name)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    parts = (_flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in tree.items())
    return {key: value for part in parts for key, value in part.items()}


THRESHOLDS = {
    "communication_share": 0.2,  # of a step's time
    "idle_share": 0.3,  # of the step, of ranks that wait
    "longest_to_mean": 4.0,  # response lengths of a step
    "slow_sync_to_median": 5.0,
    "memory_growth_gib": 1.0,  # from the second to the last step, and by a quarter
    "mismatch": 0.01,  # mean difference of probabilities, verl's rule of thumb
    "is_clipped_fraction": 0.1,  # importance weights
    "entropy_left": 0.2,  # of the entropy at the start
    "more_dead_experts": 0.1,  # share of a mixture's experts, above that at the start
    "groups_without_signal": 0.5,
    "truncated": 0.2,  # share of responses
    "length_ratio": 2.0,  # between the ends of the run
    "reward_gain": 0.05,  # above this, training reward has risen
    "validation_loss": 0.03,  # below the best validation by this: it has fallen
    "policy_clip_fraction": 0.3,
}
_COMMUNICATION = (
    "update_weights",
    "gather_rollouts",
    "exchange_rollouts",
    "receive_rollouts",
    "wait_for_critic",
)
_NOT_OF_STEP = ("step", "testing", "save_checkpoint", "export", "start")
_END = 0.2  # share of the steps that the start and the end of a run are averaged over


@dataclass(frozen=True)
class Finding:
    """A problem: what was seen, and what to change.

    keys: the settings that the advice names.
    """

    subject: str
    text: str
    advice: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Phase:
    """Mean seconds of a phase per step, and its share of the step."""

    name: str
    seconds: float
    share: float
    is_communication: bool


def phases_of(run: LoggedRun) -> list[Phase]:
    """Return the phases of a step, the longest first; without the first step, which warms up."""
    rows = [row for row in run.rows if "timing_s/step" in row]
    rows = rows[1:] or rows
    if not rows:
        return []
    step = fmean(row["timing_s/step"] for row in rows)
    names = {name.removeprefix("timing_s/") for row in rows for name in row if "timing_s/" in name}
    own = [name for name in names if "/" not in name and name not in _NOT_OF_STEP]
    seconds = {name: sum(r.get(f"timing_s/{name}", 0.0) for r in rows) / len(rows) for name in own}
    seconds["other"] = max(0.0, step - sum(seconds.values()))
    phases = [Phase(n, s, s / step, n in _COMMUNICATION) for n, s in seconds.items()]
    return sorted(phases, key=lambda phase: -phase.seconds)


def phase_table(phases: Sequence[Phase]) -> Table:
    """Return a table of the phases."""
    table = Table("phase", "seconds", "share", "", box=None, pad_edge=False)
    for phase in phases:
        bar = "█" * round(40 * phase.share)
        kind = "  communication" if phase.is_communication else ""
        table.add_row(phase.name, f"{phase.seconds:8.3f}", f"{phase.share:5.1%}", bar + kind)
    return table


def find_problems(run: LoggedRun) -> list[Finding]:
    """Return the problems that the metrics show, in the order of the checks."""
    return [finding for check in _CHECKS for finding in check(run)]


def _ends(run: LoggedRun, metric: str) -> tuple[float, float] | None:
    """Return the means of a metric at the start and at the end; None for under five values."""
    values = list(run.series(metric).values())
    if len(values) < 5:
        return None
    count = max(1, round(_END * len(values)))
    return fmean(values[:count]), fmean(values[-count:])


def _last(run: LoggedRun, metric: str) -> float:
    """Return the mean of a metric at the end of the run; 0 where it is not logged."""
    values = list(run.series(metric).values())
    return fmean(values[-max(1, round(_END * len(values))) :]) if values else 0.0


def _time(run: LoggedRun) -> Iterator[Finding]:
    share = sum(phase.share for phase in phases_of(run) if phase.is_communication)
    if share > THRESHOLDS["communication_share"]:
        yield Finding(
            "communication",
            f"moving weights and rollouts takes {share:.0%} of a step",
            "larger buckets and the delta sync send less often and less; a larger batch "
            "has more computation for the same sync",
            ("reshard.bucket_mib", "reshard.delta", "data.train_batch_size"),
        )
    for name, who in (("trainer", "trainer"), ("rollouter", "engine"), ("critic", "critic")):
        if (idle := _last(run, f"{name}/idle_ratio")) > THRESHOLDS["idle_share"]:
            yield Finding(
                "imbalance",
                f"the {who} ranks wait for {idle:.0%} of a step",
                "give their work more to do, or move ranks to the side that is waited for",
                ("rollout.n_gpus_per_node", "trainer.n_gpus_per_node", "trainer.staleness"),
            )
    mean, longest = _last(run, "response_length/mean"), _last(run, "response_length/max")
    if mean and longest / mean > THRESHOLDS["longest_to_mean"]:
        yield Finding(
            "imbalance",
            f"the longest response of a step is {longest / mean:.1f} times the mean one, "
            "so generation waits for a few responses",
            "train while the engine generates, or limit the length",
            ("trainer.mode", "data.max_response_length"),
        )


def _sync(run: LoggedRun) -> Iterator[Finding]:
    times = list(run.series("reshard/ms").values())[1:]
    if len(times) < 5 or max(times) < THRESHOLDS["slow_sync_to_median"] * median(times):
        return
    text = f"the slowest weight sync takes {max(times):.0f} ms, the median one {median(times):.0f}"
    advice = "see whether other processes use the network or the CPU at that time"
    yield Finding("weight sync", text, advice)


def _memory(run: LoggedRun) -> Iterator[Finding]:
    values = list(run.series("perf/cpu_memory_used_gb").values())[1:]
    if len(values) < 5:
        return
    growth = values[-1] - values[0]
    if growth < max(THRESHOLDS["memory_growth_gib"], values[0] / 4):
        return
    text = f"the memory of rank 0 grew from {values[0]:.1f} to {values[-1]:.1f} GiB"
    advice = "check the reward function and the tools for lists that grow with every call"
    yield Finding("memory", text, advice)


def _mismatch(run: LoggedRun) -> Iterator[Finding]:
    parity = run.parity
    if found := parity.get("finding"):
        yield Finding(
            "mismatch",
            f"{found['point']} is the first part of the engine that differs from the trained "
            f"model, by {found['difference']:.1e}: {found['cause']}",
            f"repair it; correction until then: {parity['correction']}",
        )
    if (diff := _last(run, "training/rollout_probs_diff_mean")) > THRESHOLDS["mismatch"]:
        yield Finding(
            "mismatch",
            f"engine and trainer differ by {diff:.3f} in the mean probability of a token",
            parity.get("correction")
            or "use the same data type on both sides; keep the importance weights on; "
            "`hybridengine parity` names the operator that differs",
            (
                "rollout.dtype",
                "actor.fsdp_config.dtype",
                "algorithm.rollout_correction.rollout_is",
            ),
        )
    clipped = _last(run, "rollout_corr/rollout_is_clipped_fraction")
    if clipped > THRESHOLDS["is_clipped_fraction"]:
        yield Finding(
            "mismatch",
            f"{clipped:.0%} of the importance weights are clipped: rollouts are off-policy",
            "lower the staleness or the learning rate, or center the score, whose drift clipped "
            "weights leave",
            ("trainer.staleness", "actor.optim.lr", "algorithm.score_centering.enabled"),
        )


def _entropy(run: LoggedRun) -> Iterator[Finding]:
    ends = _ends(run, "actor/entropy")
    if ends is None or ends[1] > THRESHOLDS["entropy_left"] * ends[0]:
        return
    yield Finding(
        "entropy collapse",
        f"the entropy fell from {ends[0]:.3f} to {ends[1]:.3f} nats: responses to a prompt "
        "become the same",
        "raise the upper clip limit or the entropy coefficient, or lower the learning rate",
        ("actor.clip_ratio_high", "actor.entropy_coeff", "actor.optim.lr"),
    )


def _experts(run: LoggedRun) -> Iterator[Finding]:
    ends = _ends(run, "moe/dead_experts")
    if ends is None or ends[1] - ends[0] < THRESHOLDS["more_dead_experts"]:
        return
    yield Finding(
        "expert collapse",
        f"the experts that no token of a step selects went from {ends[0]:.0%} to {ends[1]:.0%}",
        "balance the load by a loss or by the bias, or freeze the routers",
        (
            "actor.router_aux_loss_coef",
            "actor.router_bias_update_rate",
            "actor.freeze_moe_router",
        ),
    )


def _reward(run: LoggedRun) -> Iterator[Finding]:
    rewards, scores = _ends(run, "critic/score/mean"), list(run.series("val/score").values())
    has_risen = rewards is not None and rewards[1] - rewards[0] > THRESHOLDS["reward_gain"]
    if rewards and has_risen and scores[-1:] < [max(scores, default=0) - _fall(scores)]:
        yield Finding(
            "reward hacking or overfitting",
            f"the training reward rose from {rewards[0]:.3f} to {rewards[1]:.3f}, while "
            f"validation fell from its best, {max(scores):.3f}, to {scores[-1]:.3f}",
            "read responses with a high reward (hybridengine view), then correct the reward, "
            "or keep the policy near its start",
            ("actor.use_kl_loss", "actor.kl_loss_coef"),
        )
    without = _last(run, "frac_reward_zero_std")
    if without > THRESHOLDS["groups_without_signal"]:
        yield Finding(
            "no signal",
            f"all responses have the same reward in {without:.0%} of the groups, "
            "which then train nothing",
            "leave such groups out, sample more responses, or use other prompts",
            ("algorithm.filter_groups.enable", "rollout.n"),
        )


def _fall(scores: Sequence[float]) -> float:
    return max(THRESHOLDS["validation_loss"], THRESHOLDS["validation_loss"] * abs(max(scores)))


def _length(run: LoggedRun) -> Iterator[Finding]:
    if (truncated := _last(run, "response_length/clip_ratio")) > THRESHOLDS["truncated"]:
        yield Finding(
            "length",
            f"{truncated:.0%} of the responses are cut off at the longest length",
            "allow longer responses, or do not train on those that are cut off",
            ("data.max_response_length", "algorithm.mask_truncated_completions"),
        )
    ends = _ends(run, "response_length/mean")
    if ends and ends[0] and max(ends) / max(1e-9, min(ends)) > THRESHOLDS["length_ratio"]:
        yield Finding(
            "length drift",
            f"the mean length went from {ends[0]:.0f} to {ends[1]:.0f} tokens",
            "check with hybridengine view that this serves the task and not the reward; the "
            "loss mode decides how much long responses count",
            ("actor.loss_agg_mode",),
        )


def _updates(run: LoggedRun) -> Iterator[Finding]:
    skipped = sum(sum(run.series(f"{who}/skipped_updates").values()) for who in ("actor", "train"))
    if skipped:
        text = f"{skipped:.0f} updates were skipped, because loss or gradient was not finite"
        keys = ("actor.optim.lr", "actor.fsdp_config.dtype")
        yield Finding("updates", text, "lower the learning rate; use bfloat16", keys)
    clipped = _last(run, "actor/pg_clipfrac")
    if clipped > THRESHOLDS["policy_clip_fraction"]:
        text = f"the policy loss clips {clipped:.0%} of the tokens"
        keys = ("actor.optim.lr", "actor.ppo_epochs")
        yield Finding("updates", text, "lower the learning rate or the epochs", keys)


_CHECKS = (_time, _sync, _memory, _mismatch, _entropy, _experts, _reward, _length, _updates)
