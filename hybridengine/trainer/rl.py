"""GRPO (arXiv 2402.03300), PPO (arXiv 1707.06347) and their kin, as one straight line per step:

prompts → generate → score → pack → log-probs, values → rewards, advantages → critic → policy →
weights into the engine.

Deviations: the loss is averaged over tokens by default (DAPO, arXiv 2503.14476, eq. 12); where a
rollout is used for one optimizer step only, the old log-probs are those of the step itself; the
gap between engine and trainer is corrected by truncated importance weights by default.
"""

from __future__ import annotations

import resource
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.algorithms import (
    NEEDS,
    AdvantageOptions,
    KLController,
    Responses,
    advantages,
)
from hybridengine.checkpoint import Checkpointer
from hybridengine.config import GRPOConfig
from hybridengine.data import PromptLoader
from hybridengine.distributed import Session, run_rank
from hybridengine.kernels import token_kl
from hybridengine.model import on_device, save_pretrained
from hybridengine.model.export import save_description
from hybridengine.reshard import SyncReport
from hybridengine.rollout import SamplingSpec
from hybridengine.tracking import FlopCounter
from hybridengine.trainer.batching import Batch
from hybridengine.trainer.report import Reporter, spread, step_metrics
from hybridengine.trainer.rollouts import Rollout, RolloutMaker, select_groups
from hybridengine.trainer.setup import (
    build_actor,
    build_critic,
    build_engine,
    build_replicas,
    build_resharder,
    build_reward_model,
    load_data,
)

__all__ = ["train_grpo"]


def train_grpo(config: GRPOConfig) -> None:
    """Run one rank of a GRPO job; under torchrun, or started by `hybridengine grpo`."""
    run_rank(
        lambda session: _Run(config, session).train(),
        config.trainer.default_local_dir,
        config.trainer.timeout_s,
    )


class _Run:
    """Everything one rank holds during a job."""

    def __init__(self, config: GRPOConfig, session: Session) -> None:
        self.started = time.perf_counter()
        self.config, self.session = config, session
        self.dir = Path(config.trainer.default_local_dir)
        torch.manual_seed(config.seed)
        if session.is_main:  # until the progress bar takes over
            session.on_phase = lambda phase: print(f"… {phase.replace('_', ' ')}", flush=True)
        with session.phase("load_data"):
            self.tokenizer, self.prompts, self.val, reward = load_data(config)
            data = config.data
            self.loader = PromptLoader(
                self.prompts, data.train_batch_size, seed=config.seed, shuffle=data.shuffle
            )
        self.mini_batches = data.train_batch_size // config.ppo_mini_batch_size
        epochs = config.trainer.total_epochs
        self.steps = config.trainer.total_training_steps or epochs * len(self.loader)
        with session.phase("start_engine"):
            self.engine = build_engine(config, self.tokenizer)
        with session.phase("load_model"):
            self.engine.sleep()
            updates = self.steps * self.mini_batches * config.actor.ppo_epochs
            self.replicas = build_replicas(config, session)
            self.actor = build_actor(config, self.engine, self.replicas, updates)
            self.needs = NEEDS[config.algorithm.adv_estimator]
            self.critic = (
                build_critic(config, self.replicas, updates) if "values" in self.needs else None
            )
            reward_model = (
                build_reward_model(config, self.tokenizer, session)
                if config.reward.reward_model.enable
                else None
            )
        self.flops = FlopCounter(self.actor.model, session.device, session.world_size)
        with session.phase("plan_reshard"):
            self.resharder = build_resharder(config, self.actor, self.engine)
        self.maker = RolloutMaker(self.engine, self.tokenizer, reward, session, reward_model)
        self.kl = _kl_controller(config)
        trained = {"actor": (self.actor.model, self.actor.optimizer)}
        if self.critic is not None:
            trained["critic"] = (self.critic.model, self.critic.optimizer)
        self.checkpoints = Checkpointer(
            self.dir,
            trained,
            {"loader": self.loader} | ({"kl": self.kl} if self.kl else {}),
            keep=config.trainer.max_actor_ckpt_to_keep,
        )
        self.alone, _ = dist.new_subgroups(1)  # every rank holds the whole batch
        self.syncs: list[SyncReport] = []
        r, v = config.rollout, config.rollout.val_kwargs
        self.sampling = SamplingSpec(
            r.n, r.temperature, r.top_p, r.top_k, config.data.max_response_length
        )
        temperature = v.temperature if v.do_sample else 0.0
        self.greedy = replace(self.sampling, n=1, temperature=0.0)
        self.val_sampling = SamplingSpec(
            v.n, temperature, v.top_p, v.top_k, config.data.max_response_length
        )

    def train(self) -> None:
        trainer = self.config.trainer
        with self.session.phase("resume"):
            first = self.checkpoints.resume(trainer.resume_mode, trainer.resume_from_path)
        with ExitStack() as stack:
            report = stack.enter_context(Reporter(self.config, self.session, self.steps, first))
            report.plan(self.resharder.plan, self.prompts, self.val, type(self.engine).__name__)
            self._sync(first)
            if self.val is not None and trainer.val_before_train and not first:
                self._validate(report, 0)
            for step in range(first + 1, self.steps + 1):
                self._step(report, step)
                last, score = step == self.steps, None
                if self.val is not None and (last or _due(step, trainer.test_freq)):
                    score = self._validate(report, step)
                if trainer.save_freq > 0 and (last or _due(step, trainer.save_freq)):
                    self._save(report, step, score)
                self.checkpoints.check()
            with self.session.phase("save_checkpoint"), on_device(self.actor.model):
                save_pretrained(self.actor.model, self.tokenizer, self.dir / "final")
                self.checkpoints.wait()
            with self.session.phase("summary"):
                report.finish(self._facts(time.perf_counter() - self.started))
        dist.barrier()
        self.engine.shutdown()

    def _step(self, report: Reporter, step: int) -> None:
        self.session.step = step
        self.session.take_timings()
        started = time.perf_counter()
        epoch = self.loader.epoch
        rollouts, metrics = self._rollouts(step)
        baselines = self._greedy_scores(rollouts) if "reward_baselines" in self.needs else None
        self.engine.sleep()
        with on_device(self.actor.model):
            batch, trained = self._train(rollouts, baselines, step)
            sync = self._sync(step)
        metrics |= trained
        seconds = time.perf_counter() - started
        timings = self.session.take_timings()
        metrics |= step_metrics(batch, self.session, timings, seconds)
        if "update_actor" in timings:
            lengths = [r.num_tokens for r in rollouts] * self.config.actor.ppo_epochs
            metrics["perf/mfu/actor"] = self.flops.utilisation(lengths, timings["update_actor"])
        metrics |= {
            "training/global_step": step,
            "training/epoch": epoch,
            "reshard/bytes_received": sync.bytes_received,
            "reshard/ms": sync.milliseconds,
        }
        report.step(step, metrics, rollouts)

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
        tries = chosen.max_num_gen_batches if chosen.enable else 1
        batches: list[list[Rollout]] = []
        while True:
            seed = self.config.seed + step + len(batches) * self.steps
            batches.append(self.maker.make(self.loader.next_batch(), self.sampling, seed))
            if not chosen.enable:
                return batches[0], {}
            rollouts, with_signal = select_groups(batches, chosen.metric, wanted)
            if with_signal == wanted or len(batches) == tries:
                return rollouts, {
                    "training/num_gen_batches": len(batches),
                    "training/groups_without_signal": wanted - with_signal,
                }

    def _advantages(self, batch: Batch, baselines: list[float] | None) -> dict[str, float]:
        """Advantages and returns into `batch`, from which truncated responses may be masked."""
        algorithm, rollouts = self.config.algorithm, batch.rollouts
        with self.session.phase("adv"):
            token_rewards, metrics = self._token_rewards(batch)
            responses = Responses(
                rewards=batch.sequence_sums(token_rewards),
                group_ids=torch.tensor([r.group for r in rollouts], device=token_rewards.device),
                cu_seqlens=batch.cu_seqlens,
                response_mask=batch.response_mask,
                token_rewards=token_rewards,
                values=batch.values,
                reward_baselines=None if baselines is None else token_rewards.new_tensor(baselines),
                reward_parts=self._reward_parts(batch) if "reward_parts" in self.needs else None,
            )
            options = AdvantageOptions(
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_by_std=algorithm.norm_adv_by_std_in_grpo,
                process_group=self.alone,
            )
            batch.advantages, batch.returns = advantages(
                algorithm.adv_estimator, responses, options
            )
            if algorithm.mask_truncated_completions:
                whole = [r.finish_reason != "length" for r in rollouts]
                batch.response_mask &= batch.advantages.new_tensor(whole)[batch.sequence_ids].bool()
        return metrics | spread("critic/rewards", responses.rewards)

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

    def _reward_parts(self, batch: Batch) -> Tensor:
        """[N, K], the further results of the reward that GDPO normalises each by itself."""
        extras = [r.extras for r in batch.rollouts]
        return batch.rollout_log_probs.new_tensor([list(e.values()) for e in extras])

    def _sync(self, version: int) -> SyncReport:
        with self.session.phase("update_weights"), on_device(self.actor.model):
            self.syncs.append(self.resharder.sync(version))
        return self.syncs[-1]

    def _validate(self, report: Reporter, step: int) -> float:
        """Returns the mean score."""
        assert self.val is not None
        started = time.perf_counter()
        rollouts: list[Rollout] = []
        size = self.config.data.val_batch_size or len(self.val)
        for at in range(0, len(self.val), size):
            batch = self.val[at : at + size]
            rollouts += self.maker.make(batch, self.val_sampling, seed=self.config.seed)
        report.validation(step, rollouts, time.perf_counter() - started)
        return fmean(r.score for r in rollouts)

    def _save(self, report: Reporter, step: int, score: float | None) -> None:
        started, whole = time.perf_counter(), self.config.trainer.save_hf_model
        model = self.actor.model
        with self.session.phase("save_checkpoint"):
            self.checkpoints.save(
                step, score, lambda f: save_description(model, self.tokenizer, f, whole)
            )
        report.saved(step, time.perf_counter() - started)

    def _facts(self, seconds: float) -> dict[str, float | int | list[int]]:
        """What the summary says of the whole run; collective."""
        plan = self.resharder.plan
        peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        dist.all_reduce(peak)  # GiB, all ranks together
        received: list[int] = [0] * self.session.world_size
        dist.all_gather_object(received, self.syncs[-1].bytes_received)
        return {
            "seconds": round(seconds, 1),
            "steps": self.steps,
            "world_size": self.session.world_size,
            "tp_size": self.engine.tp_size,
            "reshard_bytes_received_per_rank": received,
            "reshard_bytes_lower_bound_per_rank": plan.lower_bound,
            "reshard_ms_p50": round(median(s.milliseconds for s in self.syncs), 2),
            "peak_rss_gib": round(float(peak), 2),
            "seed": self.config.seed,
        }


def _kl_controller(config: GRPOConfig) -> KLController | None:
    algorithm = config.algorithm
    if not algorithm.use_kl_in_reward:
        return None
    control = algorithm.kl_ctrl
    adaptive = control.type == "adaptive"
    return KLController(control.kl_coef, control.target_kl, control.horizon, adaptive)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
