"""The loop that all kinds of training share: resume, validate, step, save, finish."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.table import Table

from hybridengine.checkpoint import Checkpointer
from hybridengine.config import JobConfig
from hybridengine.data import PromptLoader
from hybridengine.distributed import Session
from hybridengine.model import on_device, save_adapter, save_pretrained
from hybridengine.model.export import save_description
from hybridengine.tracking import FlopCounter, performance_metrics
from hybridengine.trainer.report import Reporter

__all__ = ["Job"]


class Job:
    """One rank of a run. A kind of training sets these attributes and writes the methods below.

    val: what to validate on, or None; epochs: how often a step trains on each of its tokens.
    """

    tokenizer: Any
    loader: PromptLoader
    val: Sequence[Any] | None
    model: Any
    checkpoints: Checkpointer
    epochs = 1

    def __init__(self, config: JobConfig, session: Session) -> None:
        self.started = time.perf_counter()
        self.session, self.trainer, self._config = session, config.trainer, config
        self.dir = Path(config.trainer.default_local_dir)

    def plan(self) -> Table:
        """What the run is going to do."""
        raise NotImplementedError

    def begin(self, step: int) -> None:
        """After a resume at `step`, before anything else."""

    def step(self, step: int) -> tuple[dict[str, float], list[int]]:
        """(metrics, lengths of the sequences it worked on)."""
        raise NotImplementedError

    def validate(self, step: int) -> tuple[float, dict[str, float]]:
        """(score, larger is better; metrics)."""
        raise NotImplementedError

    def summary(self) -> dict[str, Any]:
        """What there is to say at the end; collective."""
        return {}

    @property
    def steps(self) -> int:
        return self.trainer.steps(len(self.loader))

    def train(self) -> None:
        trainer, session = self.trainer, self.session
        self.flops = FlopCounter(self.model, session.device, session.world_size)
        with session.phase("resume"):
            first = self.checkpoints.resume(trainer.resume_mode, trainer.resume_from_path)
        with Reporter(self._config, session, self.steps, first) as self.report:
            self.report.say(self.plan())
            dtype, trained_in = self._config.sharding.dtype, self.checkpoints.resumed_dtype
            if trained_in not in (None, dtype):
                self.report.say(f"computes in {dtype}; up to the checkpoint it was {trained_in}")
            self.begin(first)
            if trainer.val_before_train and not first:
                self._validate(0)
            for step in range(first + 1, self.steps + 1):
                session.step = step
                self._step(step)
                score = self._validate(step) if self._is_due(step, trainer.test_freq) else None
                if trainer.save_freq > 0 and self._is_due(step, trainer.save_freq):
                    self._save(step, score)
                    self._log_with_time(step, "save_checkpoint", {})
                self.checkpoints.check()
            with session.phase("save_checkpoint"), on_device(self.model):
                save_pretrained(self.model, self.tokenizer, self.dir / "final")
                if self._config.model.lora_rank:
                    save_adapter(self.model, self.dir / "final_adapter")
                self.checkpoints.wait()
            with session.phase("summary"):
                self.report.finish(self._summary())
        dist.barrier()

    def _is_due(self, step: int, every: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    def _step(self, step: int) -> None:
        session, started, epoch = self.session, time.perf_counter(), self.loader.epoch
        session.take_timings()
        metrics, lengths = self.step(step)
        seconds, timings = time.perf_counter() - started, session.take_timings()
        if updating := timings.get("update_actor"):
            flops = self.flops.utilisation(lengths * self.epochs, updating)
            metrics["perf/mfu/actor"] = flops
        metrics |= {f"timing_s/{name}": value for name, value in timings.items()}
        metrics |= {"training/global_step": step, "training/epoch": epoch, "timing_s/step": seconds}
        metrics |= performance_metrics(sum(lengths), seconds, session.world_size, session.device)
        self.report.log(step, metrics)

    def _validate(self, step: int) -> float | None:
        if self.val is None:
            return None
        with self.session.phase("testing"):
            score, metrics = self.validate(step)
        self._log_with_time(step, "testing", metrics)
        return score

    def _save(self, step: int, score: float | None) -> None:
        def describe(folder: Path) -> None:
            save_description(self.model, self.tokenizer, folder, self.trainer.save_hf_model)

        with self.session.phase("save_checkpoint"):
            self.checkpoints.save(step, score, describe)

    def _log_with_time(self, step: int, phase: str, metrics: dict[str, float]) -> None:
        seconds = self.session.take_timings()[phase]
        self.report.log(step, metrics | {f"timing_s/{phase}": seconds})

    def _summary(self) -> dict[str, Any]:
        return {
            "seconds": round(time.perf_counter() - self.started, 1),
            "steps": self.steps,
            "world_size": self.session.world_size,
            "seed": self._config.seed,
            "dtype": self._config.sharding.dtype,
            **self.summary(),
        }
