"""The training loop that RL and SFT share: resume, validate, step, save, finish or stop.

`BaseTrainer.train` is the loop of the command line. `hybridengine.Trainer` calls the same methods
in the same order, with the user's code between them.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed.checkpoint.stateful import Stateful

from hybridengine.kernels import check_labels
from hybridengine.model import Optimizer, SavedWork
from hybridengine.run import plugins
from hybridengine.run.config import JobConfig, config_to_yaml
from hybridengine.run.errors import ModelError
from hybridengine.run.messages import broadcast_value, run_on_rank0
from hybridengine.run.session import RunClock, Session
from hybridengine.run.storage import remove_folder
from hybridengine.run.tracking import StepTrace
from hybridengine.train.checkpoint import Checkpointer, CheckpointError, find_checkpoints
from hybridengine.train.checkpoint.folders import archive_earlier_run
from hybridengine.train.checkpoint.pretrained import save_model_files
from hybridengine.train.checkpoint.tensors import RemotePart
from hybridengine.train.choices import agree
from hybridengine.train.data import PromptLoader
from hybridengine.train.metrics import performance_metrics
from hybridengine.train.modes import Mode, mode_of
from hybridengine.train.report import (
    Reporter,
    UpdateLog,
    export_final,
    print_resumed,
    was_finished,
)

ConfigT = TypeVar("ConfigT", bound=JobConfig)


class BaseTrainer(ABC, Generic[ConfigT]):
    """One rank of a run. A subclass sets these attributes and implements the abstract methods.

    callbacks: called at `on_step_end` and `on_validation` with the step and its metrics, and at
      `on_save` with the folder of a complete checkpoint, for which the run waits; on every rank.
    val: the validation data, or None.
    epochs_per_step: how often a step trains on each token.
    optimizers: by the prefix of their metrics.
    rollout_dir: the folder of rollouts, if any.
    saved: what shared prefixes saved in one pass over the last step's tokens, over all ranks.
    """

    tokenizer: Any
    loader: PromptLoader
    val: Sequence[Any] | None
    model: Any
    checkpoints: Checkpointer
    optimizers: Mapping[str, Optimizer]
    callbacks: Mapping[str, Callable[[int, Any], object]] = MappingProxyType({})
    epochs_per_step = 1
    saved = SavedWork()

    def __init__(self, config: ConfigT, session: Session, mode: Mode | None = None) -> None:
        """mode: what other ranks do, by default that of `config`."""
        config, self.choices = agree(config)
        self.clock = RunClock("start")
        self.session, self.config, self.mode = session, config, mode or mode_of(config)
        self.dir = Path(config.trainer.default_local_dir)
        self.rollout_dir = self.dir / "rollouts"
        self._trace = StepTrace(self.dir, config.trainer.trace_step, session.rank)
        self._first = self.steps_done = 0  # before this start of the run, and up to now
        self.updates = UpdateLog()

    @classmethod
    def run(cls, config: ConfigT) -> int:
        """Run one rank and return its exit code, see `run_rank`."""
        mode = mode_of(config)
        return mode.run(lambda session: cls(config, session, mode).train())

    @abstractmethod
    def plan(self) -> Table:
        """Describe the run before it starts."""

    def sync(self, step: int) -> Any:
        """Bring the weights after `step` to where the next data is generated, if any is."""

    @abstractmethod
    def collect(self, step: int) -> Any:
        """Return the data of one step: scored rollouts, or conversations. Collective."""

    @abstractmethod
    def update(self, step: int, data: Any) -> tuple[dict[str, float], list[int]]:
        """Train on what `collect` returned; return (metrics, length of every sequence)."""

    def step(self, step: int) -> tuple[dict[str, float], list[int]]:
        """Run one training step; return (metrics, length of every sequence)."""
        return self.update(step, self.collect(step))

    def end_rollouts(self) -> None:
        """Begin to release what generates rollouts: no more are needed."""

    def close(self) -> None:
        """Release what outlives the run. The trainer cannot be used afterwards."""

    @abstractmethod
    def validate(self, step: int) -> tuple[float, dict[str, float]]:
        """Return (score, larger is better; metrics)."""

    def stop_signal(self) -> signal.Signals | None:
        """Return the signal that requested the run to stop, the same one on all ranks."""
        return self.session.stop_signal()

    def summary(self) -> dict[str, Any]:
        """Return further entries of summary.json. Collective."""
        return {}

    @property
    def step_seconds(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._step_started

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.config.trainer.steps(len(self.loader))

    def state_dict(self) -> dict[str, Any]:
        """Return what the summary of a resumed run needs to know of the earlier part."""
        parts, updates = self.clock.seconds(), self.updates.state_dict()
        return {"seconds": sum(parts.values()), "timing_s": parts, "updates": updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clock.add(state.get("timing_s", {"other": state["seconds"]}))
        if "updates" in state:
            self.updates.load_state_dict(state["updates"])

    def build_checkpoints(
        self,
        models: Mapping[str, Any],
        states: Mapping[str, Stateful],
        remote: RemotePart | None = None,
    ) -> Checkpointer:
        """models: by name, (model, optimizer). states: of everything else, by name. remote: a model
        on ranks of its own."""
        return Checkpointer(
            self.dir,
            models,
            {"loader": self.loader, "run": self, **states},
            keep=self.config.trainer.max_actor_ckpt_to_keep,
            config=config_to_yaml(self.config) if self.session.is_main else "",
            remote=remote,
        )

    def train(self) -> None:
        """Run to the last step, or until a signal stops the run after a checkpoint
        (`Session.was_stopped`)."""
        if self.resume():
            with self.start_report():
                self.begin()
                while (step := self.next_step()) is not None:
                    self.end_step(*self.step(step))
                self.finish()
        dist.barrier()
        self.close()

    def resume(self) -> bool:
        """Load a checkpoint, as configured; return whether there are steps left to run."""
        trainer, session = self.config.trainer, self.session
        arguments = self.model, session.device, session.world_size
        self.step_metrics = [x.load()(*arguments) for x in plugins("step_metrics").values()]
        with session.phase("resume"):
            mode = trainer.resume_mode
            if session.was_restarted and find_checkpoints(self.dir):
                mode = "auto"  # they are of this run: it has moved those of earlier runs away
            self._resumed = self.checkpoints.resume(mode, trainer.resume_from_path)
            self._first = self.steps_done = self._resumed.step if self._resumed else 0
            return not was_finished(self.config, self._resumed, self.steps, session.is_main)

    def start_report(self) -> Reporter:
        """Move the files of an earlier run away; return the reports of this one, a context."""
        with self.session.phase("archive"):
            moved_to = run_on_rank0(
                lambda: archive_earlier_run(self.dir, self.rollout_dir, self._resumed),
                "moving the files of an earlier run",
            )
            self.session.begin_run()
        self.report = Reporter(self.config, self.session, self.steps, self._first)
        if self.session.is_main:
            self.choices.write(self.dir)
        for reason in self.checkpoints.skipped:
            self.report.print(f"warning: {reason}")
        if moved_to is not None:
            self.report.print(f"an earlier run in {self.dir} was moved to {moved_to}")
        if self._resumed is not None:
            print_resumed(self.report.print, self._resumed, self.config, self.session.is_main)
        return self.report

    def begin(self) -> None:
        """Print the plan, synchronize the weights, and validate before the first step."""
        self.report.print(self.plan())
        self.sync(self.steps_done)
        self.clock.enter("other")
        self.session.signals.can_wait = True
        if self.config.trainer.val_before_train and not self._first:
            self.run_validation(0)

    def next_step(self) -> int | None:
        """Begin the next step; return its number, or None after the last one or a stop signal."""
        session = self.session
        if session.was_stopped or self.steps_done >= self.steps:
            return None
        session.step = self.steps_done + 1
        session.take_timings()
        self._trace.begin(session.step)
        self.clock.enter("step")
        self._step_started, self._epoch = time.perf_counter(), self.loader.epoch
        return session.step

    def end_step(self, metrics: dict[str, float], lengths: Sequence[int]) -> dict[str, float]:
        """Log the step, validate and save where that is due; return all metrics of the step."""
        trainer, session = self.config.trainer, self.session
        step = self.steps_done = session.step
        metrics = self._log_step(step, metrics, lengths)
        is_due = self._is_due(step, trainer.test_freq)
        score, _ = self.run_validation(step) if is_due else (None, {})
        stopping = self.stop_signal() if step < self.steps else None
        if stopping or step == self.steps:
            self.end_rollouts()
        if stopping or (trainer.save_freq > 0 and self._is_due(step, trainer.save_freq)):
            self.save(step, score)
        self.report.draw(if_due=True)
        self.checkpoints.check()
        if stopping:
            self._stop(stopping, step)
        return metrics

    def _log_step(
        self, step: int, metrics: dict[str, float], lengths: Sequence[int]
    ) -> dict[str, float]:
        """Log a step's metrics, timings and skipped updates; return all metrics."""
        session = self.session
        check_labels(session.device)  # the metrics have waited for the device
        seconds, timings = self.step_seconds, session.take_timings()
        self.clock.enter("other")
        self._trace.end()
        if update_seconds := timings.get("update_actor"):
            trained = [*lengths] * self.epochs_per_step
            saved = SavedWork(*(self.epochs_per_step * number for number in self.saved))
            for metrics_of in self.step_metrics:
                metrics |= metrics_of(trained, update_seconds, saved)
        metrics |= {f"timing_s/{name}": value for name, value in timings.items()} | {
            "timing_s/step": seconds,
            "training/global_step": step,
            "training/epoch": self._epoch,
            "perf/shared_tokens_saved": self.saved.tokens,
            **performance_metrics(sum(lengths), seconds, session.num_ranks, session.device),
            **self.updates.take(step, self.optimizers),
        }
        self.report.log(step, metrics)
        self.updates.report(step, self.optimizers, self.report.print)
        self._call_back("on_step_end", step, metrics)
        return metrics

    def run_validation(self, step: int) -> tuple[float | None, dict[str, float]]:
        """Validate and log; return (score, metrics), (None, {}) without validation data."""
        if self.val is None:
            return None, {}
        with self.clock.inside("testing"), self.session.phase("testing", absorbs=True):
            score, metrics = self.validate(step)
        metrics = self._log_with_time(step, "testing", metrics)
        self._call_back("on_validation", step, metrics)
        return score, metrics

    def save(self, step: int, score: float | None) -> None:
        """Start to save a checkpoint; wait for it only where a callback is told of it."""
        self.start_save(step, score)
        self._log_with_time(step, "save_checkpoint", {})
        if "on_save" in self.callbacks:
            self._call_back("on_save", step, self.wait_for_save(step))

    def _call_back(self, event: str, step: int, argument: Any) -> None:
        if event in self.callbacks:
            self.callbacks[event](step, argument)

    def start_save(self, step: int, score: float | None) -> None:
        """Start to save a checkpoint. Collective."""
        describe = partial(
            save_model_files,
            self.model,
            self.tokenizer,
            dtype=self.save_dtype,
            weights=self.config.trainer.save_hf_model,
            group=self.checkpoints.group,
        )
        with self.clock.inside("save_checkpoint"), self.session.writing("save_checkpoint"):
            self.checkpoints.save(step, score, describe)

    def wait_for_save(self, step: int) -> Path:
        """Wait until the checkpoint of `step` is on the disk; return its folder. Collective."""
        with self.clock.inside("save_checkpoint"), self.session.writing("wait_for_save"):
            self.checkpoints.wait()
            dist.barrier()  # rank 0 has given the checkpoint its name
        self.session.take_timing("wait_for_save")
        return self.dir / f"global_step_{step}"

    def _log_with_time(self, step: int, phase: str, metrics: dict[str, float]) -> dict[str, float]:
        metrics = metrics | {f"timing_s/{phase}": self.session.take_timing(phase)}
        self.report.log(step, metrics)
        return metrics

    @property
    def save_dtype(self) -> torch.dtype:
        """The type of saved weights."""
        dtype: torch.dtype = getattr(torch, self.config.trainer.save_dtype)
        return dtype

    def _stop(self, stopping: signal.Signals, step: int) -> None:
        """Wait for the checkpoint of `step`, draw the curves and print how to resume."""
        saved = self.wait_for_save(step)
        self.session.was_stopped = True
        self.report.draw()
        mode = self.config.trainer.resume_mode
        option = "" if mode == "auto" else " with trainer.resume_mode=auto"
        self.report.print(
            f"stopped by {stopping.name} after step {step} of {self.steps}; saved "
            f"{saved}; the same command{option} resumes from it"
        )

    def finish(self) -> None:
        """Save the trained model and write the summary, unless the run was stopped."""
        session = self.session
        if session.was_stopped:
            return
        session.step = self.steps_done  # also where none was left to run
        self._write_final()
        with session.phase("summary"):
            self.report.draw()
            parts = self.clock.seconds()
            summary = {
                "seconds": round(sum(parts.values()), 1),
                "timing_s": {name: round(x, 3) for name, x in parts.items()},
                "steps": self.steps_done,
                "resumed_after_step": self._first or None,
                "world_size": session.world_size,
                "seed": self.config.seed,
                "dtype": self.config.sharding.dtype,
                "save_dtype": self.config.trainer.save_dtype,
                **self.summary(),
            }
            self.report.finish(summary)

    def _write_final(self) -> None:
        """Save the last checkpoint, then export the model: a failed export loses no training.

        A run whose last updates were all skipped keeps its checkpoint and exports no model. A run
        without checkpoints removes it afterwards. Collective.

        Raises:
            ModelError: the last updates were all skipped, or the export failed; the message names
                the checkpoint.
            CheckpointError: the model is exported, but a checkpoint that was asked for failed.
        """
        saved, problem = None, None
        skipped = self.updates.failure(self.optimizers)
        wants_checkpoints = self.config.trainer.save_freq > 0
        is_first = broadcast_value(not find_checkpoints(self.dir), bool)
        try:
            saved = self.wait_for_save(self.steps_done)
            if not broadcast_value(saved.is_dir(), bool):
                self.start_save(self.steps_done, None)
                saved = self.wait_for_save(self.steps_done)
        except CheckpointError as error:
            if skipped is not None:
                raise ModelError(f"{skipped}; {error}") from error
            problem = error
            self.report.print(f"warning: {error}; the model is exported without a checkpoint")
        if skipped is not None:
            raise ModelError(
                f"{skipped}; the state is in {saved}, final/ was not written: `hybridengine export "
                f"{saved} --out {self.dir / 'final'}` exports these weights"
            )
        group, has_adapter = self.checkpoints.group, self.config.model.lora_rank > 0
        with self.clock.inside("export"), self.session.writing("export"):
            dtype = self.save_dtype
            export_final(self.model, self.tokenizer, self.dir, dtype, group, has_adapter, saved)
        if problem is not None and wants_checkpoints:
            raise problem
        if saved is not None and is_first and not wants_checkpoints and self.session.is_main:
            remove_folder(saved)

    def _is_due(self, step: int, every: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)
