"""The loop that all kinds of training share: resume, validate, step, save, finish or stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.table import Table

from hybridengine.checkpoint import (
    Checkpointer,
    Resumable,
    SavedCheckpoint,
    changed_settings,
)
from hybridengine.checkpoint.pretrained import save_description, save_pretrained
from hybridengine.checkpoint.run_dir import set_earlier_run_aside
from hybridengine.config import JobConfig, config_to_yaml
from hybridengine.data import PromptLoader
from hybridengine.model import ModelError, Optimizer, on_device, save_adapter
from hybridengine.runtime import Session
from hybridengine.runtime.rank_zero import broadcast_from_rank0, run_on_rank0
from hybridengine.tracking import FlopCounter, performance_metrics
from hybridengine.trainer.report import Reporter

__all__ = ["MAX_SKIPPED_UPDATES", "Job"]

MAX_SKIPPED_UPDATES = 10  # in a row, for a gradient norm that is not finite; then the run fails

_CURVES = 20  # drawings of the learning curves while a run goes on


class Job:
    """One rank of a run. A kind of training sets these attributes and writes the methods below.

    val: what to validate on, or None; epochs: how often a step trains on each of its tokens.
    optimizers: by the prefix of their metrics; rollout_dir: where rollouts go, if there are any.
    """

    tokenizer: Any
    loader: PromptLoader
    val: Sequence[Any] | None
    model: Any
    checkpoints: Checkpointer
    optimizers: Mapping[str, Optimizer]
    epochs = 1

    def __init__(self, config: JobConfig, session: Session) -> None:
        self.started = time.perf_counter()
        self.session, self.trainer, self._config = session, config.trainer, config
        self.dir = Path(config.trainer.default_local_dir)
        self.rollout_dir = self.dir / "rollouts"

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

    def state_dict(self) -> dict[str, Any]:
        """What the summary of a resumed run has to know of what came before."""
        return {"seconds": time.perf_counter() - self.started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.started -= state["seconds"]

    def build_checkpoints(
        self, models: Mapping[str, Any], counters: Mapping[str, Resumable]
    ) -> Checkpointer:
        """models: by name, (model, optimizer); counters: what else has a state, by name."""
        return Checkpointer(
            self.dir,
            models,
            {"loader": self.loader, "run": self, **counters},
            keep=self.trainer.max_actor_ckpt_to_keep,
            config=config_to_yaml(self._config),
        )

    def train(self) -> None:
        """Run to the last step, or until a signal stops the run after a checkpoint
        (`Session.was_stopped`)."""
        trainer, session = self.trainer, self.session
        self.flops = FlopCounter(self.model, session.device, session.world_size)
        with session.phase("resume"):
            resumed = self.checkpoints.resume(trainer.resume_mode, trainer.resume_from_path)
            self._first = first = resumed.step if resumed else 0
            if self._is_finished(resumed):
                return
            aside = run_on_rank0(
                lambda: set_earlier_run_aside(self.dir, self.rollout_dir, resumed),
                "moving what an earlier run has left",
            )
        with Reporter(self._config, session, self.steps, first) as self.report:
            self._say_how_it_begins(resumed, aside)
            self.report.say(self.plan())
            self.begin(first)
            session.let_steps_finish()
            if trainer.val_before_train and not first:
                self._validate(0)
            for step in range(first + 1, self.steps + 1):
                session.step = step
                self._step(step)
                score = self._validate(step) if self._is_due(step, trainer.test_freq) else None
                stopping = session.stop_signal() if step < self.steps else None
                due = trainer.save_freq > 0 and self._is_due(step, trainer.save_freq)
                if due or stopping:
                    self._save(step, score)
                    self._log_with_time(step, "save_checkpoint", {})
                if stopping or self._is_due(step, max(1, self.steps // _CURVES)):
                    self.report.draw()
                self.checkpoints.check()
                if stopping:
                    return self._stop(stopping, step)
            self._finish()
        dist.barrier()

    def _is_finished(self, resumed: SavedCheckpoint | None) -> bool:
        """Whether the run in this folder had taken its last step before; then that is said."""
        is_own = resumed is not None and resumed.path.resolve().parent == self.dir.resolve()
        there = (self.dir / "final").is_dir() and (self.dir / "summary.json").is_file()
        finished = broadcast_from_rank0(is_own and there and self._first >= self.steps)
        if finished and self.session.is_main:
            print(
                f"nothing was trained: the run in {self.dir} finished its {self._first} steps "
                "before; raise trainer.total_training_steps (or total_epochs) to train longer, or "
                "start anew with trainer.resume_mode=disable or another trainer.default_local_dir"
            )
            assert resumed is not None
            for change in changed_settings(resumed, self._config):
                print(f"  changed since, without effect: {change}")
        return finished

    def _say_how_it_begins(self, resumed: SavedCheckpoint | None, aside: Path | None) -> None:
        for reason in self.checkpoints.skipped:
            self.report.say(f"warning: {reason}")
        if aside is not None:
            self.report.say(f"what an earlier run has left in {self.dir} was moved to {aside}")
        if resumed is not None:
            self.report.say(f"resumed after step {resumed.step} from {resumed.path}")
            if self.session.is_main:
                for change in changed_settings(resumed, self._config):
                    self.report.say(f"  changed since: {change}")

    def _stop(self, stopping: signal.Signals, step: int) -> None:
        with self.session.phase("save_checkpoint"):
            self.checkpoints.wait()
        dist.barrier()  # rank 0 has given the checkpoint its name
        self.session.was_stopped = True
        again = "" if self.trainer.resume_mode == "auto" else " with trainer.resume_mode=auto"
        self.report.say(
            f"stopped by {stopping.name} after step {step} of {self.steps}; saved "
            f"{self.dir / f'global_step_{step}'}; the same command{again} goes on from there"
        )

    def _finish(self) -> None:
        session = self.session
        with session.phase("save_checkpoint"), on_device(self.model):
            save_pretrained(self.model, self.tokenizer, self.dir / "final")
            if self._config.model.lora_rank:
                save_adapter(self.model, self.dir / "final_adapter")
            self.checkpoints.wait()
        with session.phase("summary"):
            self.report.draw()
            self.report.finish(self._summary())

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
        skipped = {name: optimizer.take_skipped() for name, optimizer in self.optimizers.items()}
        metrics |= {f"{name}/skipped_updates": len(norms) for name, norms in skipped.items()}
        self.report.log(step, metrics)
        for name, norms in skipped.items():
            self._report_skipped(step, name, norms)

    def _report_skipped(self, step: int, name: str, norms: Sequence[float]) -> None:
        """Warn of updates that were skipped; ModelError, on every rank, after too many in a row."""
        for norm in norms:
            self.report.say(
                f"warning: step {step}: the gradient norm of {name} is {norm}; this update was "
                "skipped, and the weights are as before"
            )
        in_a_row = self.optimizers[name].skipped_in_a_row
        if in_a_row >= MAX_SKIPPED_UPDATES:
            raise ModelError(
                f"the gradient norm of {name} was not finite in {in_a_row} updates in a row (last "
                f"{norms[-1]}, step {step}), all of which were skipped; lower the learning rate, "
                "or check rewards and data, and resume from the newest checkpoint"
            )

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
            "resumed_after_step": self._first or None,
            "world_size": self.session.world_size,
            "seed": self._config.seed,
            "dtype": self._config.sharding.dtype,
            **self.summary(),
        }
