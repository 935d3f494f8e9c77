"""Save and resume a training job with torch's distributed checkpoint (DCP).

A checkpoint holds trained parameters, buffers, Adam's moments and schedule, the position in the
data, and every other counter; per rank the random state. Frozen parameters come from the model's
own folder. Tensors are copied to host memory, then written while training goes on; any number of
ranks can read them. On the same number of ranks a resumed run repeats the straight one bit by bit.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from hybridengine.checkpoint import folders
from hybridengine.checkpoint.folders import CheckpointError, SavedCheckpoint
from hybridengine.checkpoint.pretrained import check_disk_space
from hybridengine.checkpoint.resume import (
    CONFIG,
    STATE,
    TENSORS,
    Resumable,
    ResumePlan,
    none_left,
    read_state,
    resume_plan,
)
from hybridengine.model.offload import on_device
from hybridengine.model.optim import Optimizer
from hybridengine.model.parameters import is_finite, parameter_shards
from hybridengine.runtime.rank_zero import broadcast_from_rank0, run_on_rank0
from hybridengine.storage import file_records

__all__ = ["Checkpointer"]

T = TypeVar("T")


class Checkpointer:
    """Saves and resumes one job; every method is collective.

    Args:
        root: the run's folder.
        models: by name, each model with its optimizer (None where it is not trained).
        counters: by name, what else has a state.
        keep: how many of the newest checkpoints stay, beside the best one; None: all.
        config: the resolved configuration as YAML, which every checkpoint keeps.

    Attributes:
        skipped: why newer checkpoints than the one resumed from could not be used.
    """

    def __init__(
        self,
        root: str | Path,
        models: Mapping[str, tuple[nn.Module, Optimizer | None]],
        counters: Mapping[str, Resumable],
        keep: int | None = None,
        config: str = "",
    ) -> None:
        self._root, self._models, self._counters = Path(root), models, dict(counters)
        self._config, self.skipped = config, list[str]()
        self._counters |= {f"{name}.optimizer": o for name, (_, o) in models.items() if o}
        self._keep = keep
        self._group = dist.new_group(backend="gloo")  # its own: a save runs beside the training
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(
        self,
        step: int,
        score: float | None = None,
        also: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Begin to save; returns when nothing that training changes is needed any more.

        score: of the validation at this step, larger is better. also: writes more into the folder.

        Raises:
            CheckpointError, ModelError: this save cannot begin, or the one before it failed.
        """
        self.wait()
        written = folders.partial(self._root, step)
        with self._present() as tensors:
            num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
            run_on_rank0(lambda: self._prepare(written, num_bytes), f"saving {written}")
            torch.save(_random_state(), written / f"random_{dist.get_rank()}.pt")
            also(written)
            saving = dcp.async_save(
                tensors, checkpoint_id=written / TENSORS, process_group=self._group
            )
        self._pending = self._worker.submit(self._finish, saving, step, score)

    def wait(self) -> None:
        """Until what was begun is on the disk; raises CheckpointError if that failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            _raise_failure(pending)

    def check(self) -> None:
        """Raise CheckpointError if the save in the background has failed; waits for nothing."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def resume(self, mode: str = "auto", path: str | Path | None = None) -> SavedCheckpoint | None:
        """Load the checkpoint that `resume_plan` means and return it, or None to start anew.

        The checksums of all its files are verified first; under auto a damaged one is left out,
        with its reason in `skipped`, for the next older one.
        """
        plan = run_on_rank0(lambda: resume_plan(self._root, mode, path), "resuming")
        plan = broadcast_from_rank0(plan)
        found = self._first_undamaged(plan)
        if found is None:
            return None
        try:
            with self._present() as tensors:
                dcp.load(tensors, checkpoint_id=found.path / TENSORS, process_group=self._group)
                self._check_finite(found, tensors)
        except dcp.CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            raise CheckpointError(
                f"checkpoint {found.path} does not fit this job: {reason}"
            ) from error
        state = read_state(found)
        for name, counter in self._counters.items():
            if name not in state:
                raise CheckpointError(f"checkpoint {found.path} holds no state of {name!r}")
            counter.load_state_dict(state[name])
        _restore_random_state(found, dist.get_rank())
        return found

    def _first_undamaged(self, plan: ResumePlan) -> SavedCheckpoint | None:
        """Each rank reads its part of the files."""
        self.skipped = list(plan.skipped)
        for checkpoint in plan.candidates:
            names = sorted(checkpoint.files)[dist.get_rank() :: dist.get_world_size()]
            if not (faults := self._gathered(_fault_of(checkpoint, names))):
                return checkpoint
            self.skipped.append(faults[0])
        if plan.candidates:
            raise none_left(self.skipped)
        return None

    def _check_finite(self, found: SavedCheckpoint, tensors: dict[str, torch.Tensor]) -> None:
        trained = {
            f"{part}/model/{name}"
            for part, (model, _) in self._models.items()
            for name, _ in model.named_parameters()
        }
        mine = next((n for n, x in tensors.items() if n in trained and not is_finite(x)), None)
        if names := self._gathered(mine):
            raise CheckpointError(
                f"checkpoint {found.path}: {names[0]} holds values that are not finite (NaN or "
                "infinity); resume from an older one with trainer.resume_mode=path"
            )

    def _gathered(self, mine: T | None) -> list[T]:
        """What the ranks have to say, those with None left out; collective."""
        found: list[T | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self._group)
        return [x for x in found if x is not None]

    @contextmanager
    def _present(self) -> Iterator[dict[str, torch.Tensor]]:
        """What is saved and loaded: live tensors by `<model>/model/…` and `<model>/optim/…`."""
        tensors = {}
        with ExitStack() as stack:
            for part, (model, optimizer) in self._models.items():
                stack.enter_context(on_device(model))
                for name, tensor in _changing(model).items():
                    tensors[f"{part}/model/{name}"] = tensor
                if optimizer:
                    stack.enter_context(optimizer.state.present())
                    for name, tensor in optimizer.moments().items():
                        tensors[f"{part}/optim/{name}"] = tensor
            yield tensors

    def _prepare(self, written: Path, num_bytes: int) -> None:
        check_disk_space(self._root, num_bytes)
        for leftover in self._root.glob(".global_step_*.partial"):
            shutil.rmtree(leftover)
        written.mkdir(parents=True)
        state = {name: counter.state_dict() for name, counter in self._counters.items()}
        (written / STATE).write_text(json.dumps(state, indent=1))
        (written / CONFIG).write_text(self._config)

    def _finish(self, saving: Future[Any], step: int, score: float | None) -> None:
        saving.result()  # DCP's last act is on rank 0: then all ranks have written
        records, failure = dict[str, list[int]](), None
        try:
            records = file_records(folders.partial(self._root, step), self._own_files(step))
        except OSError as error:  # the others wait for this rank's answer
            failure = f"rank {dist.get_rank()}: {error}"
        if failures := self._gathered(failure):
            raise CheckpointError(f"saving a checkpoint failed on {failures[0]}")
        everything = self._gathered(records)
        if dist.get_rank() == 0:
            files = {name: record for part in everything for name, record in part.items()}
            folders.publish(self._root, step, score, files)
            folders.prune(self._root, self._keep)

    def _own_files(self, step: int) -> list[str]:
        """What this rank has written of the checkpoint, and rank 0 what no other one has."""
        folder, rank = folders.partial(self._root, step), dist.get_rank()
        of = re.compile(r"__(\d+)_\d+\.distcp|random_(\d+)\.pt")
        found = []
        for file in (f for f in folder.rglob("*") if f.is_file()):
            match = of.fullmatch(file.name)
            if int(match[1] or match[2]) == rank if match else rank == 0:
                found.append(str(file.relative_to(folder)))
        return found


def _fault_of(checkpoint: SavedCheckpoint, names: list[str]) -> str | None:
    try:
        checkpoint.verify(names)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _changing(model: nn.Module) -> dict[str, torch.Tensor]:
    """Trained parameters, and buffers; what is frozen is in the model's own folder."""
    buffers = {n: x for n, x in parameter_shards(model).items() if not isinstance(x, DTensor)}
    return buffers | {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def _raise_failure(pending: Future[None]) -> None:
    try:
        pending.result()
    except dcp.CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"saving a checkpoint failed on rank {rank}: {reason}") from error
    except OSError as error:
        raise CheckpointError(f"saving a checkpoint failed: {error}") from error


def _random_state() -> dict[str, Any]:
    """Of python, numpy and torch, in types that `weights_only` loads."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(saved: SavedCheckpoint, rank: int) -> None:
    file = saved.path / f"random_{rank}.pt"
    if not file.is_file():  # the run has grown: a rank without a past starts its own sequence
        torch.manual_seed(hash((saved.step, rank)))
        return
    state = torch.load(file, weights_only=True)
    random.setstate(state["python"])
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
