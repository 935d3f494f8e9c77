"""GRPO (arXiv 2402.03300), PPO (arXiv 1707.06347) and their kin, as one straight line per step:

prompts → generate → score → pack → log-probs, values → rewards, advantages → critic → policy →
weights into the engine.

Deviations: the loss is averaged over tokens by default (DAPO, arXiv 2503.14476, eq. 12); where a
rollout is used for one optimizer step only, the old log-probs are those of the step itself; the
gap between engine and trainer is corrected by truncated importance weights by default.
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
from hybridengine.data import PromptLoader
from hybridengine.kernels import token_kl
from hybridengine.model import on_device
from hybridengine.reshard import SyncReport
from hybridengine.rollout import SamplingSpec
from hybridengine.runtime import Session, run_rank
from hybridengine.tracking import write_rollouts
from hybridengine.trainer.algorithms import (
    NEEDS,
    AdvantageOptions,
    KLController,
    Responses,
    advantages,
)
from hybridengine.trainer.batching import Batch, Replicas
from hybridengine.trainer.held_out import HeldOut
from hybridengine.trainer.job import Job
from hybridengine.trainer.plan import plan_table
from hybridengine.trainer.precision import resolve_dtypes
from hybridengine.trainer.rollouts import (
    Rollout,
    RolloutMaker,
    reward_parts,
    scored_sample,
    select_groups,
)
from hybridengine.trainer.setup import (
    build_actor,
    build_critic,
    build_engine,
    build_resharder,
    build_reward_model,
    load_data,
)
from hybridengine.trainer.step_metrics import spread, step_metrics

__all__ = ["train_grpo"]

_SHOWN = 3  # scored samples on the screen


def train_grpo(config: GRPOConfig) -> bool:
    """Run one rank of a GRPO job; under torchrun, or started by `hybridengine grpo`.

    Returns whether it has finished; False: a signal stopped it after a checkpoint.
    """
    trainer = config.trainer
    return run_rank(lambda s: _Run(config, s).train(), trainer.default_local_dir, trainer.timeout_s)


class _Run(Job):
    """Everything one rank holds during a job."""

    def __init__(self, config: GRPOConfig, session: Session) -> None:
        config = resolve_dtypes(config)
        super().__init__(config, session)
        self.config, data, algorithm = config, config.data, config.algorithm
        torch.manual_seed(config.seed)
        if session.is_main:  # until the progress bar takes over
            session.on_phase = lambda phase: print(f"… {phase.replace('_', ' ')}", flush=True)
        with session.phase("load_data"):
            self.tokenizer, self.prompts, self.val, reward = load_data(config)
            self.loader = PromptLoader(
                self.prompts, data.train_batch_size, seed=config.seed, shuffle=data.shuffle
            )
        self.epochs = config.actor.ppo_epochs
        self.mini_batches = data.train_batch_size // config.ppo_mini_batch_size
        self.needs, self.critic, reward_model = NEEDS[algorithm.adv_estimator], None, None
        with session.phase("start_engine"):
            self.engine = build_engine(config, self.tokenizer)
        with session.phase("load_model"):
            self.engine.sleep()
            updates = self.steps * self.mini_batches * self.epochs
            self.replicas = Replicas(
                session, config.sequence_parallel_size, config.actor.ppo_max_token_len_per_gpu
            )
            self.actor = build_actor(config, self.engine, self.replicas, updates)
            self.model, trained = self.actor.model, {"actor": self.actor}
            if "values" in self.needs:
                self.critic = trained["critic"] = build_critic(config, self.replicas, updates)
            if config.reward.reward_model.enable:
                reward_model = build_reward_model(config, self.tokenizer, session)
        with session.phase("plan_reshard"):
            self.resharder = build_resharder(config, self.actor, self.engine)
        self.maker = RolloutMaker(self.engine, self.tokenizer, reward, session, reward_model)
        self.kl = _kl_controller(config) if algorithm.use_kl_in_reward else None
        self.optimizers = {name: part.optimizer for name, part in trained.items()}
        self.held_out, self.syncs = HeldOut(), list[SyncReport]()
        self.probs_diffs = list[float]()  # of the first step, and the largest
        self.checkpoints = self.build_checkpoints(
            {name: (part.model, part.optimizer) for name, part in trained.items()},
            {"held_out": self.held_out} | ({"kl": self.kl} if self.kl else {}),
        )
        self.rollout_dir = Path(config.trainer.rollout_data_dir or self.rollout_dir)
        self.alone, _ = dist.new_subgroups(1)  # every rank holds the whole batch
        self.shown: list[Rollout] = []
        r, v, limit = config.rollout, config.rollout.val_kwargs, data.max_response_length
        self.sampling = SamplingSpec(r.n, r.temperature, r.top_p, r.top_k, limit, r.stop)
        self.greedy = replace(self.sampling, n=1, temperature=0.0)
        warmth = v.temperature if v.do_sample else 0.0
        self.val_sampling = SamplingSpec(v.n, warmth, v.top_p, v.top_k, limit, r.stop)

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
            table.add_row("[bold]gathered whole", ", ".join(plan.fallback))
        return table

    def begin(self, step: int) -> None:
        self._sync(step)

    def step(self, step: int) -> tuple[dict[str, float], list[int]]:
        rollouts, metrics = self._rollouts(step)
        baselines = self._greedy_scores(rollouts) if "reward_baselines" in self.needs else None
        self.engine.sleep()
        with on_device(self.model):
            batch, trained = self._train(rollouts, baselines, step)
            sync = self._sync(step)
        metrics |= trained | step_metrics(batch)
        metrics |= {"reshard/bytes_received": sync.bytes_received, "reshard/ms": sync.milliseconds}
        diff = metrics["training/rollout_probs_diff_mean"]
        first, largest = self.probs_diffs or (diff, diff)
        self.probs_diffs = [first, max(largest, diff)]
        freq = self.config.trainer.rollout_freq
        self._write(f"step_{step}", rollouts, freq > 0 and self._is_due(step, freq))
        return metrics, [r.num_tokens for r in rollouts]

    def _train(
        self, rollouts: list[Rollout], baselines: list[float] | None, step: int
    ) -> tuple[Batch, dict[str, float]]:
        """From scored rollouts to stepped models."""
        batch = Batch.of(rollouts, self.session.device)
        minis = self.replicas.cut(batch, self.mini_batches)
        warming_up = self.critic is not None and step <= self.config.trainer.critic_warmup
        metrics = self.actor.begin(batch, minis, needs_old=warming_up)
        if self.critic is not None:
            self.critic.begin(batch, minis)
        metrics |= self._advantages(batch, baselines)
        metrics |= self.actor.correct(batch)
        if self.critic is not None:
            metrics |= self.critic.update(batch, minis)
        if not warming_up:
            metrics |= self.actor.update(batch, minis)
        return batch, metrics

    def _rollouts(self, step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Scored responses to one batch of prompts; with filter_groups, to prompts with signal."""
        chosen, wanted = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        batches: list[list[Rollout]] = []
        while True:
            seed = self.config.seed + step + len(batches) * self.steps
            batches.append(self.maker.make(self.loader.next_batch(), self.sampling, seed))
            if not chosen.enable:
                return batches[0], {}
            rollouts, with_signal = select_groups(batches, chosen.metric, wanted)
            if with_signal == wanted or len(batches) == chosen.max_num_gen_batches:
                return rollouts, {
                    "training/num_gen_batches": len(batches),
                    "training/groups_without_signal": wanted - with_signal,
                }

    def _advantages(self, batch: Batch, baselines: list[float] | None) -> dict[str, float]:
        """Advantages and returns into `batch`, from which truncated responses may be masked."""
        algorithm, rollouts = self.config.algorithm, batch.rollouts
        with self.session.phase("adv"):
            token_rewards, metrics = self._token_rewards(batch)
            number = token_rewards.new_tensor
            parts, weights = self._reward_parts(rollouts)
            responses = Responses(
                rewards=batch.sequence_sums(token_rewards),
                group_ids=torch.tensor([r.group for r in rollouts], device=token_rewards.device),
                cu_seqlens=batch.cu_seqlens,
                response_mask=batch.response_mask,
                token_rewards=token_rewards,
                values=batch.values,
                reward_baselines=None if baselines is None else number(baselines),
                reward_parts=None if parts is None else number(parts),
            )
            options = AdvantageOptions(
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_by_std=algorithm.norm_adv_by_std_in_grpo,
                part_weights=weights,
                process_group=self.alone,
            )
            batch.advantages, batch.returns = advantages(
                algorithm.adv_estimator, responses, options
            )
            if algorithm.mask_truncated_completions:
                whole = number([r.finish_reason != "length" for r in rollouts]).bool()
                batch.response_mask &= whole[batch.sequence_ids]
        return metrics | spread("critic/rewards", responses.rewards)

    def _reward_parts(
        self, rollouts: list[Rollout]
    ) -> tuple[list[list[float]] | None, tuple[float, ...] | None]:
        """Per rollout the rewards that the estimator takes apart, and their weights."""
        algorithm = self.config.algorithm
        if "reward_parts" not in NEEDS[algorithm.adv_estimator]:
            return None, None
        return reward_parts(rollouts, algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights)

    def _token_rewards(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """[R]: the score at the last token, minus the KL of every token if it is in the reward."""
        rewards = torch.zeros_like(batch.rollout_log_probs)
        scores = [r.score for r in batch.rollouts]
        rewards[batch.cu_seqlens[1:].long() - 1] = rewards.new_tensor(scores)
        if self.kl is None:
            return rewards, {}
        assert batch.old_log_probs is not None and batch.ref_log_probs is not None
        kl = token_kl(self.config.algorithm.kl_penalty, batch.old_log_probs, batch.ref_log_probs)
        rewards -= self.kl.coef * kl
        mean = float((batch.sequence_sums(kl) / batch.cu_seqlens.diff()).mean())
        metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": self.kl.coef}
        self.kl.update(mean, len(batch.rollouts))
        return rewards, metrics

    def _greedy_scores(self, rollouts: list[Rollout]) -> list[float]:
        """Per rollout, the score of the greedy response to the same prompt (ReMax)."""
        samples = {r.group: r.sample for r in rollouts}
        greedy = self.maker.make(list(samples.values()), self.greedy, self.config.seed)
        scores = dict(zip(samples, (r.score for r in greedy), strict=True))
        return [scores[r.group] for r in rollouts]

    def _sync(self, version: int) -> SyncReport:
        with self.session.phase("update_weights"), on_device(self.model):
            self.syncs.append(self.resharder.sync(version))
        return self.syncs[-1]

    def validate(self, step: int) -> tuple[float, dict[str, float]]:
        assert self.val is not None
        size, rollouts = self.config.data.val_batch_size or len(self.val), list[Rollout]()
        for at in range(0, len(self.val), size):
            batch = self.val[at : at + size]
            rollouts += self.maker.make(batch, self.val_sampling, seed=self.config.seed)
        self._write(f"val_{step}", rollouts, self.config.trainer.rollout_freq > 0)
        return fmean(r.score for r in rollouts), self.held_out.add(rollouts)

    def _write(self, name: str, rollouts: list[Rollout], to_file: bool) -> None:
        """All rollouts to a file; some of the run's first ones, before it learns, to the screen."""
        if not self.session.is_main:
            return
        if to_file:
            write_rollouts(self.rollout_dir / f"{name}.jsonl", rollouts)
        if not self.shown:
            apart = max(1, len(rollouts) // _SHOWN)
            self.shown = rollouts[::apart][:_SHOWN]
            for r in self.shown:
                self.report.say(scored_sample(r))

    def summary(self) -> dict[str, Any]:
        peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        dist.all_reduce(peak)  # GiB, all ranks together
        received: list[int] = [0] * self.session.world_size
        dist.all_gather_object(received, self.syncs[-1].bytes_received)
        for line in self.held_out.lines():
            self.report.say(line)
        found = {
            "tp_size": self.engine.tp_size,
            "rollout_dtype": self.config.rollout.dtype,
            "reshard_bytes_received_per_rank": received,
            "reshard_bytes_lower_bound_per_rank": self.resharder.plan.lower_bound,
            "reshard_ms_p50": round(median(s.milliseconds for s in self.syncs), 2),
            "peak_rss_gib": round(float(peak), 2),
            **self.held_out.summary(),
        }
        if self.probs_diffs:
            first, largest = self.probs_diffs
            found["rollout_probs_diff_mean_first"] = first
            found["rollout_probs_diff_mean_max"] = largest
        return found


def _kl_controller(config: GRPOConfig) -> KLController:
    control = config.algorithm.kl_ctrl
    adaptive = control.type == "adaptive"
    return KLController(control.kl_coef, control.target_kl, control.horizon, adaptive)
