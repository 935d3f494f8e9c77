"""`hybridengine.Trainer`: the training loop as an object, for scripts and notebooks.

    with Trainer("examples/grpo/config.yaml", reward=my_function) as trainer:
        for step in trainer:
            rollouts = step.collect()
            step.update(rollouts)

It drives the trainers of the command line through the methods that their own loop calls
(`train.base.BaseTrainer.train`), so checks, logs, checkpoints and resuming are the same.
"""

from __future__ import annotations

import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist

from hybridengine.api.session import script_session
from hybridengine.api.settings import (
    Config,
    check_ranks,
    load_settings,
    path_of,
    reward_functions,
    save_initial_model,
)
from hybridengine.model import on_device
from hybridengine.rewards.local import given_functions
from hybridengine.run.config import ConfigError, SFTConfig
from hybridengine.run.errors import CallbackError, UsageError
from hybridengine.run.launch import run_lock
from hybridengine.run.messages import broadcast_value
from hybridengine.run.rank import rank_session
from hybridengine.sync.resharder import SyncReport
from hybridengine.train.checkpoint.pretrained import save_pretrained
from hybridengine.train.data import SFTSample
from hybridengine.train.preflight import check_job
from hybridengine.train.rollouts import Rollouts
from hybridengine.train.start import trainer_of

__all__ = ["Step", "Trainer"]

StepData = Rollouts | Sequence[SFTSample]

MetricsCallback = Callable[[int, Mapping[str, float]], object]
SaveCallback = Callable[[int, Path], object]
Callback = Callable[[int, Any], object]

_opened: weakref.ref[Trainer] | None = None  # a process has one process group, and one engine


def _checked(event: str, function: Callback) -> Callback:
    """Return the function of `event`, whose errors are a CallbackError with its line."""

    def call(step: int, argument: Any) -> None:
        try:
            function(step, argument)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise CallbackError(
                f"the callback {event} raised {type(error).__name__} after step {step}: {error} "
                f"(at {frame.filename}:{frame.lineno})"
            ) from error

    return call


class Step:
    """One step of a run: collect its data once, then update once. Steps are numbered from 1."""

    def __init__(self, trainer: Trainer, number: int) -> None:
        self._trainer, self.number = trainer, number
        self.is_collected = self.is_done = False

    def collect(self) -> Any:
        """Return the data of this step, on which the policy is to be trained. Collective.

        RL: generate responses and score them; `Rollouts`, whose `own` are those of this rank and
        whose `outcomes` are the numbers of all. SFT: the conversations, a list of `SFTSample`.
        """
        run = self._trainer._run_of(self)
        if self.is_collected:
            raise UsageError(
                f"step {self.number} has collected its data already; train on it with "
                "step.update(data)"
            )
        data = run.collect(self.number)
        self.is_collected = True
        return data

    def update(self, data: StepData) -> dict[str, float]:
        """Train on `data` and sync the weights; return all metrics of the step. Collective.

        data: the result of `collect`, or `Rollouts` derived from it (`select`, `add_reward`).
        """
        run = self._trainer._run_of(self)
        if not self.is_collected:
            raise UsageError(f"step {self.number} has no data yet; call step.collect() first")
        _check_data(data, self.number, run)
        metrics = run.end_step(*run.update(self.number, data))
        self.is_done = True
        return metrics

    def __repr__(self) -> str:
        return f"Step({self.number})"


class Trainer:
    """One training run: a loop over steps, or `fit()`.

    config: a YAML file, a mapping (nested, or with dotted keys), a RLConfig or an SFTConfig; None:
      all settings are in `overrides`.
    model: a folder or name, in place of model.path; or a loaded transformers model, which is
      written to <run>/initial_model together with `tokenizer` (default: that of its name).
    reward: a function, or several, called as `compute_score(data_source, solution_str,
      ground_truth, extra_info)` with those of these arguments, and of `prompt`, that it takes. It
      runs in a thread of this process; reward.timeout_s and reward.weights apply.
    overrides: `{"actor.optim.lr": 1e-6}`, or a list of `key=value`.
    task: "grpo" (default), "ppo" or "sft"; a RLConfig or SFTConfig names it already.
    on_step_end, on_validation: called on every rank with the step, and all of its metrics or those
      of the validation.
    on_save: called on every rank with the step, and the folder of its complete checkpoint, for
      which the run waits.

    Attributes:
        config: the resolved settings.
        model: the trained model, sharded by FSDP2.
        tokenizer: that of the model.
        rank: the number of this process among the ranks, from 0.
        num_steps: steps of the whole run.

    The process is one rank. Under torchrun every rank makes the same calls; otherwise a process
    group of one is made, and torn down by `close()`, at the end of a `with` block or at exit.

    Raises ConfigError, DataError, ModelError or RewardError as the command line does.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        model: Any = None,
        tokenizer: Any = None,
        reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        task: Literal["grpo", "ppo", "sft"] | None = None,
        on_step_end: MetricsCallback | None = None,
        on_validation: MetricsCallback | None = None,
        on_save: SaveCallback | None = None,
    ) -> None:
        _check_none_open()
        self._stack = ExitStack()
        self._step: Step | None = None
        self._is_begun = self._is_finished = self._is_closed = False
        hooks = {"on_step_end": on_step_end, "on_validation": on_validation, "on_save": on_save}
        callbacks = {name: _checked(name, f) for name, f in hooks.items() if f is not None}
        try:
            given = self._stack.enter_context(given_functions(reward_functions(reward)))
            self.config = load_settings(config, overrides, task, path_of(model), given)
            self._open(model, tokenizer, callbacks)
        except BaseException:
            self._stack.close()
            raise
        self._finalizer = weakref.finalize(self, _close_at_exit, self._stack)
        global _opened
        _opened = weakref.ref(self)

    def _open(self, model: Any, tokenizer: Any, callbacks: Mapping[str, Callback]) -> None:
        config, folder = self.config, self.config.trainer.default_local_dir
        is_ours = "RANK" in os.environ and not dist.is_initialized()
        check_ranks(config)
        if os.environ.get("RANK", "0") == "0":
            self._stack.enter_context(run_lock(folder))
            if not isinstance(model, str | Path | None):
                save_initial_model(model, tokenizer, config.model.path)
            check_job(config)
        session = self._stack.enter_context(
            rank_session(folder, config.trainer.timeout_s) if is_ours else script_session(folder)
        )
        self._run: Any = trainer_of(config)(config, session)
        self.model, self.tokenizer = self._run.model, self._run.tokenizer
        self.rank, self.num_steps = session.rank, int(self._run.steps)
        self._stack.callback(self._run.close)
        self._run.callbacks = callbacks
        if self._run.resume():
            self._stack.enter_context(self._run.start_report())
        else:
            self._is_finished = True

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps that are left; after the last one, save final/ and the summary."""
        while (step := self._next()) is not None:
            yield step
        self.finish()

    def fit(self) -> dict[str, float]:
        """Run all steps that are left; return the newest value of every metric."""
        for step in self:
            step.update(step.collect())
        return self.metrics

    def collect_data(self) -> Any:
        """Begin the next step and return its data, see `Step.collect`."""
        step = self._next()
        if step is None:
            raise UsageError(
                f"all {self.num_steps} steps are done, or the run was stopped; raise "
                "trainer.total_training_steps to train longer"
            )
        return step.collect()

    def update_policy(self, data: StepData) -> dict[str, float]:
        """Train on the data of the current step; return its metrics, see `Step.update`."""
        if self._step is None:
            raise UsageError("there is no data yet; call collect_data() first")
        return self._step.update(data)

    def validate(self) -> dict[str, float]:
        """Validate now; return the metrics. Raises ConfigError without data.val_files."""
        run = self._begin()
        if run.val is None:
            raise ConfigError("there is nothing to validate on; set data.val_files")
        metrics: dict[str, float] = run.run_validation(self.steps_done)[1]
        return metrics

    def save(self) -> Path:
        """Save a checkpoint, from which a later run resumes; return its folder. Collective."""
        run = self._between_steps("save a checkpoint")
        folder: Path = run.dir / f"global_step_{self.steps_done}"
        if not broadcast_value(folder.is_dir(), bool):
            run.save(self.steps_done, None)
        return Path(run.wait_for_save(self.steps_done))

    def export(self, folder: str | Path) -> Path:
        """Write the model and its tokenizer as a Hugging Face folder, in trainer.save_dtype.

        Collective.
        """
        self._check_open()
        checkpoints = self._run.checkpoints
        checkpoints.wait()
        with on_device(self.model):
            dtype, group = self._run.save_dtype, checkpoints.group
            save_pretrained(self.model, self.tokenizer, folder, dtype, group=group)
        return Path(folder)

    def sync(self) -> SyncReport | None:
        """Write the policy's weights into the engine, after they were changed by hand.

        Every update does this itself. None for SFT, which has no engine.
        """
        report: SyncReport | None = self._begin().sync(self.steps_done)
        return report

    def finish(self) -> None:
        """Save final/ and the summary, as at the end of a run; later calls do nothing."""
        if not self._is_finished:
            self._between_steps("finish").finish()
            self._is_finished = True

    def close(self) -> None:
        """Release engine, process group and run folder; later calls do nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._finalizer.detach() is not None:
            self._is_closed = True
            self._stack.__exit__(kind, error, trace)

    @property
    def steps_done(self) -> int:
        """Steps that have been trained, those before a resume included."""
        return int(self._run.steps_done)

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every metric."""
        report = getattr(self._run, "report", None)
        return dict(report.last) if report else {}

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("this Trainer is closed; make a new one, which resumes its run")

    def _begin(self) -> Any:
        """Return the run, begun: weights synchronized, and validated if so configured."""
        self._check_open()
        if self._is_finished and not self._is_begun:
            raise UsageError(
                f"the run in {self._run.dir} had finished its {self.num_steps} steps before; "
                "raise trainer.total_training_steps, or set trainer.resume_mode=disable"
            )
        if not self._is_begun:
            self._run.begin()
            self._is_begun = True
        return self._run

    def _between_steps(self, doing: str) -> Any:
        if self._step is not None and not self._step.is_done:
            raise UsageError(
                f"step {self._step.number} is not done; call step.update(data) before you {doing}"
            )
        return self._begin()

    def _next(self) -> Step | None:
        self._check_open()
        if self._is_finished:
            return None
        number = self._between_steps("begin the next step").next_step()
        self._step = None if number is None else Step(self, number)
        return self._step

    def _run_of(self, step: Step) -> Any:
        self._check_open()
        if step is not self._step or step.is_done:
            raise UsageError(f"step {step.number} is over; take the next one of the loop")
        return self._run


def _close_at_exit(stack: ExitStack) -> None:
    """Close what a script left open; the error that ends the script is reported to other ranks."""
    error = getattr(sys, "last_value", None) if "RANK" in os.environ else None
    with suppress(type(error)) if error else nullcontext():
        stack.__exit__(type(error) if error else None, error, None)


def _check_none_open() -> None:
    trainer = _opened() if _opened is not None else None
    if trainer is not None and not trainer._is_closed:
        folder = trainer.config.trainer.default_local_dir
        raise UsageError(
            f"a Trainer is open in this process (its run is {folder}); close() it first, or use "
            "`with Trainer(...) as trainer`"
        )


def _check_data(data: Any, step: int, run: Any) -> None:
    expected = list if isinstance(run.config, SFTConfig) else Rollouts
    if not isinstance(data, expected):
        raise UsageError(f"step.update got {type(data).__name__}, expected what collect() returns")
    if not isinstance(data, Rollouts):
        return
    if data.step != step:
        raise UsageError(
            f"step {step} got the rollouts of step {data.step}, which another policy has "
            "generated; pass those that its own collect() returned"
        )
    if len(data.prompts) < run.num_mini_batches:
        raise UsageError(
            f"step.update got {len(data.prompts)} groups for {run.num_mini_batches} optimizer "
            "steps (data.train_batch_size / actor.ppo_mini_batch_size); keep one for each"
        )
