"""GRPO (Shao et al. 2024, arXiv 2402.03300), as one straight line per step:

prompts → generate → score → group advantages → policy loss and optimizer → weights into the engine.

Deviations: the loss is averaged over tokens by default (DAPO, arXiv 2503.14476, eq. 12), and where
a rollout is used for one optimizer step only, the old log-probs are those of the step itself.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from hybridengine.algorithms import AdvantageOptions, Responses, advantages
from hybridengine.config import GRPOConfig
from hybridengine.data import PromptLoader
from hybridengine.distributed import Session, run_rank
from hybridengine.model import parameter_shards, save_pretrained
from hybridengine.reshard import Resharder, SyncReport
from hybridengine.rollout import SamplingSpec
from hybridengine.trainer.report import Reporter, step_metrics
from hybridengine.trainer.rollouts import Rollout, RolloutMaker
from hybridengine.trainer.setup import build_actor, build_engine, load_data

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
            updates = self.steps * self.mini_batches * config.actor.ppo_epochs
            self.actor = build_actor(config, self.engine, session, updates)
        with session.phase("plan_reshard"):
            self.resharder = Resharder(
                parameter_shards(self.actor.model), self.engine, config.reshard.bucket_bytes
            )
        self.maker = RolloutMaker(self.engine, self.tokenizer, reward, session)
        self.syncs: list[SyncReport] = []
        r, v = config.rollout, config.rollout.val_kwargs
        self.sampling = SamplingSpec(
            r.n, r.temperature, r.top_p, r.top_k, config.data.max_response_length
        )
        temperature = v.temperature if v.do_sample else 0.0
        self.val_sampling = SamplingSpec(
            v.n, temperature, v.top_p, v.top_k, config.data.max_response_length
        )

    def train(self) -> None:
        with ExitStack() as stack:
            report = stack.enter_context(Reporter(self.config, self.session, self.steps))
            report.plan(self.resharder.plan, self.prompts, self.val, type(self.engine).__name__)
            self._sync(0)
            if self.val is not None and self.config.trainer.val_before_train:
                self._validate(report, 0)
            for step in range(1, self.steps + 1):
                self._step(report, step)
                last = step == self.steps
                if self.val is not None and (last or _due(step, self.config.trainer.test_freq)):
                    self._validate(report, step)
                if last or _due(step, self.config.trainer.save_freq):
                    self._save(step)
            with self.session.phase("summary"):
                report.finish(self._facts(time.perf_counter() - self.started))
        dist.barrier()
        self.engine.shutdown()

    def _step(self, report: Reporter, step: int) -> None:
        self.session.step = step
        self.session.take_timings()
        started = time.perf_counter()
        epoch = self.loader.epoch
        samples = self.loader.next_batch()
        rollouts = self.maker.make(samples, self.sampling, seed=self.config.seed + step)
        with self.session.phase("adv"):
            per_token = self._advantages(rollouts)
        metrics = self.actor.update(rollouts, per_token, self.mini_batches)
        sync = self._sync(step)
        seconds = time.perf_counter() - started
        metrics |= step_metrics(rollouts, per_token, self.session, seconds)
        metrics |= {
            "training/global_step": step,
            "training/epoch": epoch,
            "reshard/bytes_received": sync.bytes_received,
            "reshard/ms": sync.milliseconds,
        }
        report.step(step, metrics, rollouts)

    def _advantages(self, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
        """Per rollout, one advantage per response token."""
        lengths = [len(r.response_ids) for r in rollouts]
        responses = Responses(
            rewards=torch.tensor([r.score for r in rollouts], dtype=torch.float32),
            group_ids=torch.tensor([r.group for r in rollouts]),
            cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            response_mask=torch.ones(sum(lengths), dtype=torch.bool),
        )
        algorithm = self.config.algorithm
        options = AdvantageOptions(norm_by_std=algorithm.norm_adv_by_std_in_grpo)
        per_token, _ = advantages(algorithm.adv_estimator, responses, options)
        return list(per_token.split(lengths))

    def _sync(self, version: int) -> SyncReport:
        with self.session.phase("update_weights"):
            self.syncs.append(self.resharder.sync(version))
        return self.syncs[-1]

    def _validate(self, report: Reporter, step: int) -> None:
        assert self.val is not None
        started = time.perf_counter()
        rollouts: list[Rollout] = []
        for batch in self.val.batches(self.config.data.val_batch_size):
            rollouts += self.maker.make(batch, self.val_sampling, seed=self.config.seed)
        report.validation(step, rollouts, time.perf_counter() - started)

    def _save(self, step: int) -> None:
        last = step == self.steps
        with self.session.phase("save_checkpoint"):
            save_pretrained(
                self.actor.model,
                self.tokenizer,
                self.dir / ("final" if last else f"step_{step}"),
            )

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


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
