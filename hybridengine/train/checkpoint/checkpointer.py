"""Save and resume a training job with torch's distributed checkpoint (DCP).

A checkpoint contains trainable parameters, buffers, Adam's moments, counters such as the schedule
and the position in the data, and per rank the state of the random generators. Frozen parameters are
read from the model's own folder. Tensors are copied to host memory, then written while training
goes on. Any number of ranks can read them; on the same number, a resumed run equals an
uninterrupted one bit for bit.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from hybridengine.model.optim import Optimizer
from hybridengine.run import messages
from hybridengine.run.errors import CheckpointError, UserError
from hybridengine.run.storage import check_disk_space, free_space, writing_to
from hybridengine.train.checkpoint import folders
from hybridengine.train.checkpoint.folders import CONFIG, STATE, SavedCheckpoint
from hybridengine.train.checkpoint.tensors import RemotePart, TensorFiles, reason_of, remote_folder

T = TypeVar("T")


class Checkpointer:
    """Saves and resumes one job; all methods are collective.

    Args:
        root: the run's folder.
        models: name → (model, its optimizer or None if it is not trained).
        states: name → another object to save, whose state is JSON-serializable.
        remote: a further model, whose ranks are another world.
        keep: number of newest checkpoints to keep, besides the best one; None: all.
        config: the resolved configuration as YAML, saved with every checkpoint; read on rank 0.

    Attributes:
        skipped: why newer checkpoints than the one resumed from could not be used.
    """

    def __init__(
        self,
        root: str | Path,
        models: Mapping[str, tuple[nn.Module, Optimizer | None]],
        states: Mapping[str, Stateful],
        keep: int | None = None,
        config: str = "",
        remote: RemotePart | None = None,
    ) -> None:
        self._root, self._states = Path(root), dict(states)
        self._tensors, self._others = TensorFiles(models), [remote] if remote is not None else []
        self._config, self.skipped = config, list[str]()
        self._states |= {f"{name}.optimizer": o for name, (_, o) in models.items() if o}
        self._keep = keep
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, step: int, score: float | None, write_extra: Callable[[Path], None]) -> None:
        """Start a save; return when all tensors are copied to host memory.

        score: the result of the validation at this step; larger is better.
        write_extra: writes further files into the folder.

        Raises:
            CheckpointError: this save cannot start, or the previous one failed.
        """
        self.wait()
        folder = folders.partial_folder(self._root, step)
        doing = _saving(self._root, step)
        random_file = folder / f"random_{dist.get_rank()}.pt"

        def prepare() -> None:
            with self._removed_if_failed(folder):
                messages.run_on_rank0(lambda: self._prepare(folder), doing, self.group)
                self._on_all_ranks(lambda: save_random_state(random_file), doing)
                write_extra(folder)

        saving = self._tensors.save(folder, prepare)
        for other in self._others:
            other.save(folder)
        self._pending = self._worker.submit(self._finish, saving, step, score)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group in which ranks wait for the writes of others; in use until `wait`."""
        return self._tensors.group

    def wait(self) -> None:
        """Wait until a started save is on the disk; raise CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise CheckpointError if the save in the background has failed; do not wait."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def resume(self, mode: str = "auto", path: str | Path | None = None) -> SavedCheckpoint | None:
        """Load the checkpoint given by `resume_plan` and return it, or None to start anew.

        The checksums of all its files are verified first. Under auto a damaged checkpoint is
        skipped for the next older one, with the reason in `skipped`.
        """
        plan = messages.run_on_rank0(
            lambda: folders.resume_plan(self._root, mode, path), "resuming"
        )
        plan = messages.broadcast_value(plan, folders.ResumePlan)
        plan = folders.without_damaged(plan, _verify_part)
        self.skipped = list(plan.skipped)
        if not plan.candidates:
            return None
        checkpoint = plan.candidates[0]
        self._tensors.load(checkpoint.path)
        state = folders.read_state(checkpoint)
        for name, stateful in self._states.items():
            if name not in state:
                raise CheckpointError(f"checkpoint {checkpoint.path} has no state of {name!r}")
            stateful.load_state_dict(state[name])
        for other in self._others:
            other.load(checkpoint.path)
        _restore_random_state(checkpoint, dist.get_rank())
        return checkpoint

    def _prepare(self, folder: Path) -> None:
        for leftover in self._root.glob(".global_step_*.partial"):
            with writing_to(leftover):
                shutil.rmtree(leftover)
        parts: list[TensorFiles | RemotePart] = [self._tensors, *self._others]
        check_disk_space(self._root, sum(part.num_bytes for part in parts))
        state = {name: stateful.state_dict() for name, stateful in self._states.items()}
        with writing_to(folder):
            folder.mkdir(parents=True)
            (folder / STATE).write_text(json.dumps(state, indent=1))
            (folder / CONFIG).write_text(self._config)

    def _finish(self, saving: Future[Any], step: int, score: float | None) -> None:
        """Wait until the tensors are written, then complete the checkpoint. On every rank."""
        folder, doing = folders.partial_folder(self._root, step), _saving(self._root, step)
        with self._removed_if_failed(folder):
            try:
                saving.result()  # DCP writes its metadata last, after all ranks have written
            except dcp.CheckpointException as error:
                raise CheckpointError(f"{doing} failed{reason_of(error)}") from error
            not_own = {folder / remote_folder(other.name) for other in self._others}
            own = (file for file in folder.rglob("*") if not_own.isdisjoint(file.parents))
            files = self._tensors.records(folder, own, doing)
            for other in self._others:
                saved = partial(other.saved, folder) if dist.get_rank() == 0 else dict
                files |= self._on_all_ranks(saved, doing)

            def complete() -> None:
                with writing_to(folder):
                    folders.publish(self._root, step, score, files)
                    folders.prune(self._root, self._keep)

            messages.run_on_rank0(complete, doing, self.group, CheckpointError)

    def _on_all_ranks(self, fn: Callable[[], T], doing: str) -> T:
        return messages.run_on_all_ranks(fn, CheckpointError, doing, self.group)

    @contextmanager
    def _removed_if_failed(self, folder: Path) -> Iterator[None]:
        """Remove the partial checkpoint of a failed save; report the free space."""
        try:
            yield
        except UserError as error:
            space = free_space(folder)
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(f"{error} ({space})") from error


def _saving(root: Path, step: int) -> str:
    return f"saving checkpoint {root / f'global_step_{step}'}"


def _verify_part(checkpoint: SavedCheckpoint) -> None:
    """Verify checksums, each rank those of a part of the files; collective."""
    names = sorted(checkpoint.files)[dist.get_rank() :: dist.get_world_size()]
    messages.run_on_all_ranks(
        lambda: checkpoint.verify(names), CheckpointError, "verifying checksums"
    )


def _random_state() -> dict[str, Any]:
    """Return the random states of python, numpy and torch, in types that `weights_only` loads."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    assert isinstance(keys, np.ndarray)
    state = {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def save_random_state(file: Path) -> None:
    with writing_to(file):
        torch.save(_random_state(), file)


def _restore_random_state(checkpoint: SavedCheckpoint, rank: int) -> None:
    file = checkpoint.path / f"random_{rank}.pt"
    if not file.is_file():  # more ranks than before
        torch.manual_seed(hash((checkpoint.step, rank)))
        return
    state = torch.load(file, weights_only=True)
    random.setstate(state["python"])
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
