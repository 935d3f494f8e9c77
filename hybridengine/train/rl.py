"""GRPO (arXiv 2402.03300), PPO (arXiv 1707.06347) and related methods, as one line per step:

prompts → generate → score → exchange and pack → reference and old log-probs, values → rewards,
advantages → update critic → update policy → sync weights into the engine. `RLTrainer.collect`
and `update` are that line.

Deviations: the loss is averaged over tokens by default (DAPO, arXiv 2503.14476, eq. 12); where a
batch is used for one optimizer step only, the old log-probs are those of the step itself; the gap
between engine and trainer is corrected by truncated importance weights by default.
"""

from __future__ import annotations

import resource
import signal
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from hybridengine.model import on_device
from hybridengine.run import load_plugin, plugins
from hybridengine.run.config import RLConfig
from hybridengine.run.session import Session
from hybridengine.sync.resharder import SyncReport
from hybridengine.train.advantages import compute_advantages, compute_rewards
from hybridengine.train.algorithms import NEEDS, KLController, uses_critic
from hybridengine.train.base import BaseTrainer
from hybridengine.train.batch import RolloutBatch
from hybridengine.train.build import (
    build_actor,
    build_critic,
    build_data_parallel,
    import_external,
    load_data,
)
from hybridengine.train.data import PromptDataset, Subset
from hybridengine.train.metrics import Problem, batch_metrics, problems_of, probs_diff
from hybridengine.train.models import ExternalCritic, Learner, StepCritic, needs_old_log_probs
from hybridengine.train.modes import Mode
from hybridengine.train.plan import plan_table
from hybridengine.train.rollout_files import (
    TokenRecord,
    format_rollout,
    rollout_file,
    texts_on_rank0,
    with_training,
)
from hybridengine.train.rollout_source import sampling_of, val_sampling_of
from hybridengine.train.rollouts import Rollouts, select_groups

_NUM_PRINTED = 3  # scored samples on the screen


class RLTrainer(BaseTrainer[RLConfig]):
    """One rank that trains in an RL run."""

    val: PromptDataset | None

    def __init__(self, config: RLConfig, session: Session, mode: Mode | None = None) -> None:
        import_external(config)  # it may register the estimator, on which choices depend
        super().__init__(config, session, mode)
        config, mode = self.config, self.mode  # with resolved types
        torch.manual_seed(config.seed)
        if session.is_main:  # until the progress bar takes over
            session.on_phase = lambda phase: print(f"… {phase.replace('_', ' ')}", flush=True)

        with session.phase("load_data"):
            data = load_data(config)
        self.tokenizer, self.loader = data.tokenizer, data.loader
        self.prompts, self.val = data.train, data.val
        self.epochs_per_step = config.actor.ppo_epochs
        self.num_mini_batches = config.data.train_batch_size // config.ppo_mini_batch_size
        num_updates = self.steps * self.num_mini_batches * self.epochs_per_step
        has_critic = uses_critic(config)
        self.critic_warmup = config.trainer.critic_warmup if has_critic else 0

        # The engine comes before the model, which may be computed with the engine's weights.
        self.source = mode.rollouts(config, self.choices, session, data)
        external = mode.critic(config, session, num_updates)
        with session.phase("load_model"):
            self.dp = build_data_parallel(config, session, self.choices)
            self.actor = build_actor(
                config, self.choices, self.source, self.dp, num_updates, self.steps
            )
            self.model = self.actor.model
            self.critic = external or StepCritic()
            if external is None and has_critic:
                self.critic = build_critic(config, self.dp, num_updates)
            reward_model = None
            if config.reward.reward_model.enable:
                scorer = load_plugin("rewards", "reward_model", "reward.reward_model.enable")
                reward_model = scorer.build(config, self.tokenizer, session)
        self.source.connect(self.actor, reward_model)
        if external is not None:
            external.wait_until_built()

        schedule, self.kl = config.algorithm.kl_ctrl, None
        if config.algorithm.use_kl_in_reward:
            self.kl = KLController(schedule, schedule.kl_coef, self.steps)
        # What is kept of validations, by the names of checkpoints.
        self.validations = {name: x.load()() for name, x in plugins("validations").items()}
        self.syncs = list[SyncReport]()
        self.probs_diffs = list[float]()  # mean difference: [of the first step, the largest]
        self.rollout_dir = Path(config.trainer.rollout_data_dir or self.rollout_dir)
        self.printed_samples = False
        self._prepare_checkpoints(external)

    def _prepare_checkpoints(self, external: ExternalCritic | None) -> None:
        """Name what a checkpoint keeps: models with their optimizers, and every other state."""
        trained = [part for part in (self.actor, self.critic) if isinstance(part, Learner)]
        states: dict[str, Any] = {**self.validations}
        if self.kl is not None:
            states["kl"] = self.kl
        if self.config.schedules_kl_loss:
            states["kl_loss"] = self.actor.kl
        self.optimizers = {part.name: part.optimizer for part in trained}
        if external is not None:
            self.optimizers["critic"] = states["critic.optimizer"] = external.optimizer
        models = {part.name: (part.model, part.optimizer) for part in trained}
        self.checkpoints = self.build_checkpoints(models, states, external)

    def collect(self, step: int) -> Rollouts:
        """Generate and score responses to the prompts of one step.

        With filter_groups (DAPO), further batches are generated until enough groups have signal.
        """
        filtering, wanted = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        batches = [self.source.next_batch(step, 0)]
        rollouts, self._generation_metrics = batches[0], dict[str, float]()
        if filtering.enable:
            rollouts, with_signal = select_groups(batches, filtering.metric, wanted)
            while with_signal < wanted and len(batches) != filtering.max_num_gen_batches:
                batches.append(self.source.next_batch(step, len(batches)))
                rollouts, with_signal = select_groups(batches, filtering.metric, wanted)
            self._generation_metrics = {
                "training/num_gen_batches": len(batches),
                "training/groups_without_signal": wanted - with_signal,
            }
        if "reward_baselines" in NEEDS[self.config.algorithm.adv_estimator]:
            rollouts = self._with_baselines(rollouts)
        return replace(rollouts, step=step)

    def _with_baselines(self, rollouts: Rollouts) -> Rollouts:
        """Add the score of a greedy response to each prompt (ReMax)."""
        greedy = replace(sampling_of(self.config), n=1, temperature=0.0, record_routes=False)
        best = self.source.generate(rollouts.prompts, greedy, self.config.seed).outcomes.last
        outcomes = rollouts.outcomes
        scores = best.scores[outcomes.groups]
        return replace(rollouts, outcomes=outcomes.with_column("baseline", scores))

    def update(self, step: int, data: Rollouts) -> tuple[dict[str, float], list[int]]:
        """Train on scored rollouts and sync the weights; return metrics and sequence lengths."""
        rollouts, metrics = data, self._generation_metrics
        config, actor, critic = self.config, self.actor, self.critic
        algorithm, freq = config.algorithm, config.trainer.rollout_freq
        path = self._rollout_path(f"step_{step}", freq > 0 and self._is_due(step, freq))
        actor.record = None if path is None else TokenRecord()
        self.source.sleep()
        with on_device(self.model):
            batch = self._build_batch(rollouts)
            self.saved = self.dp.sum_saved(m.saved for m in batch.micro_batches)
            critic.begin(step, rollouts, batch)

            batch = replace(batch, ref_log_probs=actor.ref_log_probs(batch))
            warming_up = step <= self.critic_warmup
            bypasses = algorithm.rollout_correction.bypass_mode
            if bypasses:
                batch = replace(batch, old_log_probs=batch.rollout_log_probs)
            elif warming_up or needs_old_log_probs(config, self.num_mini_batches):
                batch = replace(batch, old_log_probs=actor.old_log_probs(batch))
                metrics |= self._probs_diff(step, batch)
            batch = replace(batch, values=critic.values(batch))

            with self.session.phase("adv"):
                rewards, reward_metrics = compute_rewards(batch, self.dp, self.kl, algorithm)
                advantages, returns = compute_advantages(batch, self.dp, rewards, algorithm)
                mask = self._trained_tokens(batch)
                batch = replace(batch, advantages=advantages, returns=returns, response_mask=mask)
            are_old_known = batch.old_log_probs is not None
            if are_old_known and not bypasses:
                is_weights, response_mask, correction_metrics = actor.rollout_correction(batch)
                batch = replace(batch, is_weights=is_weights, response_mask=response_mask)
                metrics |= {name: float(value) for name, value in correction_metrics.items()}

            metrics |= critic.update(batch)
            if not warming_up:
                batch, update_metrics = actor.update(batch)
                metrics |= update_metrics
            if not are_old_known and not config.distills:  # they are those of the update
                metrics |= self._probs_diff(step, batch)
            sync = self.sync(step)
        metrics |= (
            critic.finish(self.step_seconds)
            | reward_metrics
            | batch_metrics(batch, self.dp.group)
            | sync.metrics
            | self.source.metrics(step, rollouts)
        )
        self._record(path, rollouts, batch, metrics)
        return metrics, rollouts.outcomes.lengths.tolist()

    def _build_batch(self, rollouts: Rollouts) -> RolloutBatch:
        max_tokens = self.config.actor.ppo_max_token_len_per_gpu
        return self.dp.build_batch(rollouts, self.num_mini_batches, max_tokens)

    def _trained_tokens(self, batch: RolloutBatch) -> Tensor:
        """Return the response mask, bool [R], without truncated responses if so configured."""
        if not self.config.algorithm.mask_truncated_completions:
            return batch.response_mask
        is_complete = batch.per_response(~batch.outcomes.is_truncated)
        return batch.response_mask & is_complete[batch.sequence_ids]

    def sync(self, step: int) -> SyncReport:
        """Write the policy's weights, as version `step`, into the engine."""
        with on_device(self.model):
            self.syncs.append(self.source.sync(step))
        return self.syncs[-1]

    def _probs_diff(self, step: int, batch: RolloutBatch) -> dict[str, float]:
        """Compare engine and trainer at the tokens that are trained on. Collective."""
        batch = replace(batch, response_mask=self._trained_tokens(batch))
        same = batch.response_mask & self.choices.exact
        if self.config.trainer.mode != "sync":  # weights of other responses are older
            is_own = batch.per_response(batch.outcomes.versions == step - 1)
            same &= is_own[batch.sequence_ids]
        return probs_diff(batch, self.dp.group, same)

    def validate(self, step: int) -> tuple[float, dict[str, float]]:
        assert self.val is not None
        size, problems = self.config.data.val_batch_size or len(self.val), list[Problem]()
        path = self._rollout_path(f"val_{step}", self.config.trainer.rollout_freq > 0)
        sampling = val_sampling_of(self.config)
        with rollout_file(path, self.session.is_main) as write:
            for start in range(0, len(self.val), size):
                prompts = Subset(self.val, range(start, min(start + size, len(self.val))))
                rollouts = self.source.generate(prompts, sampling, self.config.seed)
                problems += problems_of(rollouts)
                write(rollouts)
                self._print_samples(rollouts)
        scores = [score for _, results, _ in problems for score in results["score"]]
        metrics = {
            f"val/{name}": fmean(fmean(results[name]) for _, results, _ in problems)
            for name in problems[0][1]
        }
        for validation in self.validations.values():
            metrics |= validation.add(problems)
        return fmean(scores), metrics

    def _record(
        self,
        path: Path | None,
        rollouts: Rollouts,
        batch: RolloutBatch,
        metrics: dict[str, float],
    ) -> None:
        """Keep what the summary reports of this step, and write its rollouts to `path`, if any."""
        diff = metrics.get("training/rollout_probs_diff_mean")
        if diff is not None:
            first, largest = self.probs_diffs or (diff, diff)
            self.probs_diffs = [first, max(largest, diff)]
        with (
            self.session.phase("write_rollouts"),
            rollout_file(path, self.session.is_main) as write,
        ):
            if (record := self.actor.record) is not None:
                assert batch.advantages is not None
                means = batch.sequence_means(batch.advantages)
                means = self.dp.gather_responses(batch, means).cpu()
                bypasses = self.config.algorithm.rollout_correction.bypass_mode
                before = None if bypasses else batch.old_log_probs
                rollouts = with_training(rollouts, batch, record, means, before)
            write(rollouts)
        self._print_samples(rollouts)

    def _rollout_path(self, name: str, is_due: bool) -> Path | None:
        return self.rollout_dir / f"{name}.jsonl" if is_due else None

    def _print_samples(self, rollouts: Rollouts) -> None:
        """Print some of the run's first rollouts, before training. Collective."""
        if self.printed_samples:
            return
        self.printed_samples = True
        rows = range(len(rollouts.outcomes))
        chosen = rows[:: max(1, len(rows) // _NUM_PRINTED)][:_NUM_PRINTED]
        lines = b"".join(texts_on_rank0(rollouts, format_rollout, chosen))
        self.report.print(lines.decode().removesuffix("\n"))

    def end_rollouts(self) -> None:
        self.source.end()

    def close(self) -> None:
        self.critic.close("stopped" if self.session.was_stopped else "finished")
        self.source.close()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "probs_diffs": self.probs_diffs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.probs_diffs = state["probs_diffs"]

    def plan(self) -> Table:
        table = plan_table(self.config, self.prompts, self.val, self.choices)
        for name, text in self.source.describe().items():
            table.add_row(f"[bold]{name}", text)
        return table

    def stop_signal(self) -> signal.Signals | None:
        return self.session.stop_signal(self.source.stop_signal() or self.critic.stop_signal())

    def summary(self) -> dict[str, Any]:
        peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        dist.all_reduce(peak)  # GiB, all ranks together
        for validation in self.validations.values():
            for line in validation.lines():
                self.report.print(line)
        summary = {
            "rollout_dtype": self.config.rollout.dtype,
            **self.source.summary(self.syncs[-1]),
            **self.critic.summary(),
            "reshard_ms_p50": round(median(s.milliseconds for s in self.syncs), 2),
            "peak_rss_gib": round(float(peak), 2),
            **{k: x for part in self.validations.values() for k, x in part.summary().items()},
        }
        if self.probs_diffs:
            first, largest = self.probs_diffs
            summary["rollout_probs_diff_mean_first"] = first
            summary["rollout_probs_diff_mean_max"] = largest
        return summary
