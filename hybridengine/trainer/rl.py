"""GRPO (arXiv 2402.03300), PPO (arXiv 1707.06347) and related methods, as one line per step:

prompts → generate → score → pack → reference and old log-probs, values → rewards, advantages →
update critic → update policy → sync weights into the engine. `GRPOTrainer.step` is that line.

Deviations: the loss is averaged over tokens by default (DAPO, arXiv 2503.14476, eq. 12); where a
batch is used for one optimizer step only, the old log-probs are those of the step itself; the gap
between engine and trainer is corrected by truncated importance weights by default.
"""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from hybridengine.config import GRPOConfig
from hybridengine.data import PromptDataset, PromptLoader
from hybridengine.kernels import token_kl
from hybridengine.model import on_device
from hybridengine.reshard import SyncReport
from hybridengine.rollout import SamplingSpec
from hybridengine.runtime.session import Session
from hybridengine.tracking.files import write_rollouts
from hybridengine.trainer.algorithms import (
    NEEDS,
    AdvantageOptions,
    KLController,
    Responses,
    advantages,
)
from hybridengine.trainer.base import Trainer
from hybridengine.trainer.batch import (
    DataParallel,
    RolloutBatch,
    batch_metrics,
    mean_max_min,
    probs_diff,
)
from hybridengine.trainer.build import (
    build_actor,
    build_critic,
    build_engine,
    build_resharder,
    build_reward_model,
    load_data,
    uses_critic,
)
from hybridengine.trainer.models import Actor, Critic, needs_old_log_probs
from hybridengine.trainer.plan import plan_table, resolve_dtypes
from hybridengine.trainer.rollouts import (
    Rollout,
    RolloutGenerator,
    format_rollout,
    reward_parts,
    select_groups,
)
from hybridengine.trainer.validation import ValidationHistory

_NUM_PRINTED = 3  # scored samples on the screen


class GRPOTrainer(Trainer[GRPOConfig]):
    """One rank of an RL run."""

    val: PromptDataset | None

    def __init__(self, config: GRPOConfig, session: Session) -> None:
        config = resolve_dtypes(config)
        super().__init__(config, session)
        data, algorithm = config.data, config.algorithm
        torch.manual_seed(config.seed)
        if session.is_main:  # until the progress bar takes over
            session.on_phase = lambda phase: print(f"… {phase.replace('_', ' ')}", flush=True)
        with session.phase("load_data"):
            self.tokenizer, self.prompts, self.val, reward = load_data(config)
            self.loader = PromptLoader(
                self.prompts, data.train_batch_size, seed=config.seed, shuffle=data.shuffle
            )
        self.epochs_per_step = config.actor.ppo_epochs
        self.num_mini_batches = data.train_batch_size // config.ppo_mini_batch_size
        self.needs = NEEDS[algorithm.adv_estimator]
        self.critic: Critic | None = None
        reward_model = None
        with session.phase("start_engine"):
            self.engine = build_engine(config, self.tokenizer)
        with session.phase("load_model"):
            self.engine.sleep()
            updates = self.steps * self.num_mini_batches * self.epochs_per_step
            self.dp = DataParallel(session, config.sequence_parallel_size)
            self.actor = build_actor(config, self.engine, self.dp, updates)
            self.model = self.actor.model
            trained: dict[str, Actor | Critic] = {"actor": self.actor}
            if uses_critic(config):
                self.critic = build_critic(config, self.dp, updates)
                trained["critic"] = self.critic
            if config.reward.reward_model.enable:
                reward_model = build_reward_model(config, self.tokenizer, session)
        with session.phase("plan_reshard"):
            self.resharder = build_resharder(config, self.model, self.engine)
        scoring = (self.tokenizer, reward, session, reward_model)
        self.generator = RolloutGenerator(self.engine, *scoring)
        self.kl = KLController(algorithm.kl_ctrl) if algorithm.use_kl_in_reward else None
        self.optimizers = {name: part.optimizer for name, part in trained.items()}
        self.validations, self.syncs = ValidationHistory(), list[SyncReport]()
        self.probs_diffs = list[float]()  # mean difference: [of the first step, the largest]
        self.checkpoints = self.build_checkpoints(
            {name: (part.model, part.optimizer) for name, part in trained.items()},
            {"held_out": self.validations} | ({"kl": self.kl} if self.kl else {}),
        )
        self.rollout_dir = Path(config.trainer.rollout_data_dir or self.rollout_dir)
        self.own_group, _ = dist.new_subgroups(1)  # every rank holds the whole batch
        self.printed_samples = False
        r, v, limit = config.rollout, config.rollout.val_kwargs, data.max_response_length
        self.sampling = SamplingSpec(r.n, r.temperature, r.top_p, r.top_k, limit, r.stop)
        self.greedy = replace(self.sampling, n=1, temperature=0.0)
        val_temperature = v.temperature if v.do_sample else 0.0
        self.val_sampling = SamplingSpec(v.n, val_temperature, v.top_p, v.top_k, limit, r.stop)

    def begin(self, step: int) -> None:
        self._sync_weights(step)

    def step(self, step: int) -> tuple[dict[str, float], list[int]]:
        """Run one RL step; return its metrics and the length of every sequence."""
        config, actor, critic = self.config, self.actor, self.critic
        rollouts, metrics = self._generate_and_score(step)
        baselines = self._greedy_scores(rollouts) if "reward_baselines" in self.needs else None
        self.engine.sleep()
        with on_device(self.model):
            batch = RolloutBatch.pack(rollouts, self.session.device)
            max_tokens = config.actor.ppo_max_token_len_per_gpu
            mini_batches = self.dp.split(batch, self.num_mini_batches, max_tokens)

            batch = replace(batch, ref_log_probs=actor.ref_log_probs(mini_batches))
            warming_up = critic is not None and step <= config.trainer.critic_warmup
            if warming_up or needs_old_log_probs(config, self.num_mini_batches):
                batch = replace(batch, old_log_probs=actor.old_log_probs(mini_batches))
                metrics |= probs_diff(batch)
            if critic is not None:
                batch = replace(batch, values=critic.values(mini_batches))

            with self.session.phase("adv"):
                token_rewards, reward_metrics = self._token_rewards(batch)
                advantages, returns = self._advantages(batch, token_rewards, baselines)
                batch = replace(batch, advantages=advantages, returns=returns)
                batch = replace(batch, response_mask=self._trained_tokens(batch))
            if batch.old_log_probs is not None:
                is_weights, response_mask, correction_metrics = actor.rollout_correction(batch)
                batch = replace(batch, is_weights=is_weights, response_mask=response_mask)
                metrics |= {name: float(value) for name, value in correction_metrics.items()}

            if critic is not None:
                metrics |= critic.update(batch, mini_batches)
            if batch.old_log_probs is None:  # used for one optimizer step only
                old_log_probs, update_metrics = actor.update_once(batch, mini_batches)
                batch = replace(batch, old_log_probs=old_log_probs)
                metrics |= update_metrics | probs_diff(batch)
            elif not warming_up:
                metrics |= actor.update(batch, mini_batches)
            sync = self._sync_weights(step)
        metrics |= reward_metrics | batch_metrics(batch)
        metrics |= {"reshard/bytes_received": sync.bytes_received, "reshard/ms": sync.milliseconds}
        self._record(step, rollouts, metrics)
        return metrics, [r.num_tokens for r in rollouts]

    def _generate_and_score(self, step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Generate and score responses to one batch of prompts.

        With filter_groups (DAPO), further batches are generated until enough groups have signal.
        """
        filtering, wanted = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        batches: list[list[Rollout]] = []
        while True:
            prompts, seed = self.loader.next_batch(), self.config.seed + step
            seed += len(batches) * self.steps
            batches.append(self.generator.generate(prompts, self.sampling, seed))
            if not filtering.enable:
                return batches[0], {}
            rollouts, with_signal = select_groups(batches, filtering.metric, wanted)
            if with_signal == wanted or len(batches) == filtering.max_num_gen_batches:
                return rollouts, {
                    "training/num_gen_batches": len(batches),
                    "training/groups_without_signal": wanted - with_signal,
                }

    def _greedy_scores(self, rollouts: list[Rollout]) -> list[float]:
        """Generate a greedy response to each prompt (ReMax); return its score per rollout."""
        samples = {r.group: r.sample for r in rollouts}
        greedy = self.generator.generate(list(samples.values()), self.greedy, self.config.seed)
        scores = dict(zip(samples, (r.score for r in greedy), strict=True))
        return [scores[r.group] for r in rollouts]

    def _token_rewards(self, batch: RolloutBatch) -> tuple[Tensor, dict[str, float]]:
        """Compute rewards [R] and their metrics: the score at the last token of each response.

        With a KL in the reward, every token's KL penalty is subtracted and the controller of its
        coefficient advances.
        """
        rewards, metrics = torch.zeros_like(batch.rollout_log_probs), dict[str, float]()
        scores = batch.per_response([r.score for r in batch.rollouts])
        rewards[batch.cu_seqlens[1:].long() - 1] = scores
        if self.kl is not None:
            assert batch.old_log_probs is not None and batch.ref_log_probs is not None
            penalty = self.config.algorithm.kl_penalty
            kl = token_kl(penalty, batch.old_log_probs, batch.ref_log_probs)
            rewards -= self.kl.coef * kl
            mean_kl = float((batch.sequence_sums(kl) / batch.cu_seqlens.diff()).mean())
            metrics["actor/reward_kl_penalty"] = mean_kl
            metrics["actor/reward_kl_penalty_coeff"] = self.kl.coef
            self.kl.update(mean_kl, len(batch.rollouts))
        return rewards, metrics | mean_max_min("critic/rewards", batch.sequence_sums(rewards))

    def _advantages(
        self, batch: RolloutBatch, token_rewards: Tensor, baselines: list[float] | None
    ) -> tuple[Tensor, Tensor]:
        """Compute (advantages, returns), [R] each, by the configured estimator."""
        algorithm, rollouts = self.config.algorithm, batch.rollouts
        parts, weights = None, None
        if "reward_parts" in self.needs:
            values, weights = reward_parts(
                rollouts, algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
            )
            parts = token_rewards.new_tensor(values)
        responses = Responses(
            rewards=batch.sequence_sums(token_rewards),
            group_ids=torch.tensor([r.group for r in rollouts], device=token_rewards.device),
            cu_seqlens=batch.cu_seqlens,
            response_mask=batch.response_mask,
            token_rewards=token_rewards,
            values=batch.values,
            reward_baselines=None if baselines is None else batch.per_response(baselines),
            reward_parts=parts,
        )
        options = AdvantageOptions(
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_by_std=algorithm.norm_adv_by_std_in_grpo,
            part_weights=weights,
            process_group=self.own_group,
        )
        return advantages(algorithm.adv_estimator, responses, options)

    def _trained_tokens(self, batch: RolloutBatch) -> Tensor:
        """Return the response mask, bool [R], without truncated responses if so configured."""
        if not self.config.algorithm.mask_truncated_completions:
            return batch.response_mask
        complete = batch.per_response([r.finish_reason != "length" for r in batch.rollouts]).bool()
        return batch.response_mask & complete[batch.sequence_ids]

    def _sync_weights(self, version: int) -> SyncReport:
        with self.session.phase("update_weights"), on_device(self.model):
            self.syncs.append(self.resharder.sync(version))
        return self.syncs[-1]

    def validate(self, step: int) -> tuple[float, dict[str, float]]:
        assert self.val is not None
        size, rollouts = self.config.data.val_batch_size or len(self.val), list[Rollout]()
        for start in range(0, len(self.val), size):
            prompts = self.val[start : start + size]
            rollouts += self.generator.generate(prompts, self.val_sampling, self.config.seed)
        self._write_rollouts(f"val_{step}", rollouts, self.config.trainer.rollout_freq > 0)
        return fmean(r.score for r in rollouts), self.validations.add(rollouts)

    def _record(self, step: int, rollouts: list[Rollout], metrics: dict[str, float]) -> None:
        """Keep what the summary reports of this step, and write its rollouts if they are due."""
        diff = metrics["training/rollout_probs_diff_mean"]
        first, largest = self.probs_diffs or (diff, diff)
        self.probs_diffs = [first, max(largest, diff)]
        freq = self.config.trainer.rollout_freq
        self._write_rollouts(f"step_{step}", rollouts, freq > 0 and self._is_due(step, freq))

    def _write_rollouts(self, name: str, rollouts: list[Rollout], to_file: bool) -> None:
        """Write rollouts to <name>.jsonl; print some of the run's first ones, before training."""
        if not self.session.is_main:
            return
        if to_file:
            write_rollouts(self.rollout_dir / f"{name}.jsonl", rollouts)
        if not self.printed_samples:
            self.printed_samples = True
            for r in rollouts[:: max(1, len(rollouts) // _NUM_PRINTED)][:_NUM_PRINTED]:
                self.report.print(format_rollout(r))

    def train(self) -> None:
        super().train()
        self.engine.shutdown()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "probs_diffs": self.probs_diffs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.probs_diffs = state["probs_diffs"]

    def plan(self) -> Table:
        plan, mib = self.resharder.plan, 2.0**20
        table = plan_table(self.config, self.prompts, self.val)
        table.add_row(
            "[bold]weight sync",
            f"into {type(self.engine).__name__}: {max(plan.bytes_received) / mib:.1f} MiB received "
            f"per rank and step (lower bound {max(plan.lower_bound) / mib:.1f}), "
            f"{len(plan.buckets)} buckets of up to {plan.staging_bytes / mib:.1f} MiB",
        )
        if plan.fallback:
            table.add_row("[bold]fully gathered", ", ".join(plan.fallback))
        return table

    def summary(self) -> dict[str, Any]:
        peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        dist.all_reduce(peak)  # GiB, all ranks together
        received: list[int] = [0] * self.session.world_size
        dist.all_gather_object(received, self.syncs[-1].bytes_received)
        for line in self.validations.lines():
            self.report.print(line)
        summary = {
            "tp_size": self.engine.tp_size,
            "rollout_dtype": self.config.rollout.dtype,
            "reshard_bytes_received_per_rank": received,
            "reshard_bytes_lower_bound_per_rank": self.resharder.plan.lower_bound,
            "reshard_ms_p50": round(median(s.milliseconds for s in self.syncs), 2),
            "peak_rss_gib": round(float(peak), 2),
            **self.validations.summary(),
        }
        if self.probs_diffs:
            first, largest = self.probs_diffs
            summary["rollout_probs_diff_mean_first"] = first
            summary["rollout_probs_diff_mean_max"] = largest
        return summary
