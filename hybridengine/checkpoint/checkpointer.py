"""Save and resume a training job with torch's distributed checkpoint (DCP).

A checkpoint contains trainable parameters, buffers, Adam's moments, counters such as the schedule
and the position in the data, and per rank the state of the random generators. Frozen parameters are
read from the model's own folder. Tensors are copied to host memory, then written while training
goes on. Any number of ranks can read them; on the same number, a resumed run equals an
uninterrupted one bit for bit.

`torch.distributed.checkpoint.state_dict` is not used: it saves a tied head twice, also a frozen one
under LoRA; it starts Adam's step at 1 if no update was made; and loading its optimizer state
overwrites a learning rate or weight decay that the configuration has changed.
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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from hybridengine.checkpoint import folders
from hybridengine.checkpoint.folders import CONFIG, STATE, TENSORS, CheckpointError, SavedCheckpoint
from hybridengine.model.offload import on_device
from hybridengine.model.optim import Optimizer
from hybridengine.model.parameters import is_finite, parameter_shards
from hybridengine.runtime import all_ranks
from hybridengine.storage import check_disk_space, file_records


class Checkpointer:
    """Saves and resumes one job; all methods are collective.

    Args:
        root: the run's folder.
        models: by name, each model with its optimizer (None if it is not trained).
        states: by name, other objects to save; their state is JSON-serializable.
        keep: number of newest checkpoints to keep, besides the best one; None: all.
        config: the resolved configuration as YAML, saved with every checkpoint.

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
    ) -> None:
        self._root, self._models, self._states = Path(root), models, dict(states)
        self._config, self.skipped = config, list[str]()
        self._states |= {f"{name}.optimizer": o for name, (_, o) in models.items() if o}
        self._keep = keep
        self._group = dist.new_group(backend="gloo")  # a save runs concurrently with training
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, step: int, score: float | None, write_extra: Callable[[Path], None]) -> None:
        """Start a save; return when all tensors are copied to host memory.

        score: of the validation at this step, larger is better. write_extra: writes further files
        into the folder.

        Raises:
            CheckpointError, ModelError: this save cannot start, or the previous one failed.
        """
        self.wait()
        folder = folders.partial_folder(self._root, step)
        with self._tensors_on_device() as tensors:
            num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
            all_ranks.run_on_rank0(lambda: self._prepare(folder, num_bytes), f"saving {folder}")
            torch.save(_random_state(), folder / f"random_{dist.get_rank()}.pt")
            write_extra(folder)
            saving = dcp.async_save(
                tensors, checkpoint_id=folder / TENSORS, process_group=self._group
            )
            assert isinstance(saving, Future)
        self._pending = self._worker.submit(self._finish, saving, step, score)

    def wait(self) -> None:
        """Wait until a started save is on the disk; raise CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except (dcp.CheckpointException, OSError) as error:
                reason = f": {error}"
                if isinstance(error, dcp.CheckpointException):
                    rank, (cause, _) = next(iter(error.failures.items()))
                    reason = f" on rank {rank}: {cause}"
                raise CheckpointError(f"saving a checkpoint failed{reason}") from error

    def check(self) -> None:
        """Raise CheckpointError if the save in the background has failed; do not wait."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def resume(self, mode: str = "auto", path: str | Path | None = None) -> SavedCheckpoint | None:
        """Load the checkpoint given by `resume_plan` and return it, or None to start anew.

        The checksums of all its files are verified first. Under auto a damaged checkpoint is
        skipped for the next older one, with the reason in `skipped`.
        """
        plan = all_ranks.run_on_rank0(
            lambda: folders.resume_plan(self._root, mode, path), "resuming"
        )
        plan = all_ranks.broadcast_from_rank0(plan)
        assert plan is not None
        plan = folders.without_damaged(plan, _verify_part)
        self.skipped = list(plan.skipped)
        if not plan.candidates:
            return None
        checkpoint = plan.candidates[0]
        try:
            with self._tensors_on_device() as tensors:
                dcp.load(
                    tensors, checkpoint_id=checkpoint.path / TENSORS, process_group=self._group
                )
                self._check_finite(checkpoint, tensors)
        except dcp.CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            raise CheckpointError(
                f"checkpoint {checkpoint.path} does not fit this job: {reason}"
            ) from error
        state = folders.read_state(checkpoint)
        for name, stateful in self._states.items():
            if name not in state:
                raise CheckpointError(f"checkpoint {checkpoint.path} has no state of {name!r}")
            stateful.load_state_dict(state[name])
        _restore_random_state(checkpoint, dist.get_rank())
        return checkpoint

    def _check_finite(self, checkpoint: SavedCheckpoint, tensors: dict[str, torch.Tensor]) -> None:
        trained = {
            f"{part}/model/{name}"
            for part, (model, _) in self._models.items()
            for name, _ in model.named_parameters()
        }
        name = next((n for n, x in tensors.items() if n in trained and not is_finite(x)), None)
        all_ranks.raise_on_all_ranks(
            name
            and f"{name} contains NaN or infinity; resume from an older one with "
            "trainer.resume_mode=path",
            CheckpointError,
            f"loading checkpoint {checkpoint.path}",
        )

    @contextmanager
    def _tensors_on_device(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors to save or load: `<model>/model/<name>` and `<model>/optim/<name>`."""
        tensors = {}
        with ExitStack() as stack:
            for part, (model, optimizer) in self._models.items():
                stack.enter_context(on_device(model))
                for name, tensor in _model_tensors(model).items():
                    tensors[f"{part}/model/{name}"] = tensor
                if optimizer:
                    stack.enter_context(optimizer.offloader.on_device())
                    for name, tensor in optimizer.moments().items():
                        tensors[f"{part}/optim/{name}"] = tensor
            yield tensors

    def _prepare(self, folder: Path, num_bytes: int) -> None:
        check_disk_space(self._root, num_bytes)
        for leftover in self._root.glob(".global_step_*.partial"):
            shutil.rmtree(leftover)
        folder.mkdir(parents=True)
        state = {name: stateful.state_dict() for name, stateful in self._states.items()}
        (folder / STATE).write_text(json.dumps(state, indent=1))
        (folder / CONFIG).write_text(self._config)

    def _finish(self, saving: Future[Any], step: int, score: float | None) -> None:
        saving.result()  # DCP writes its metadata last, on rank 0, after all ranks have written
        folder = folders.partial_folder(self._root, step)
        records = all_ranks.run_on_all_ranks(
            lambda: file_records(folder, _files_of_rank(folder)),
            CheckpointError,
            "saving a checkpoint",
            self._group,
        )
        all_records: list[dict[str, list[int]]] = [{}] * self._group.size()
        dist.all_gather_object(all_records, records, group=self._group)
        if dist.get_rank() == 0:
            files = {name: record for part in all_records for name, record in part.items()}
            folders.publish(self._root, step, score, files)
            folders.prune(self._root, self._keep)


def _files_of_rank(folder: Path) -> list[str]:
    """List the files this rank has written; on rank 0 also those without a rank in the name."""
    rank, pattern = dist.get_rank(), re.compile(r"__(\d+)_\d+\.distcp|random_(\d+)\.pt")
    names = []
    for file in (f for f in folder.rglob("*") if f.is_file()):
        match = pattern.fullmatch(file.name)
        if int(match[1] or match[2]) == rank if match else rank == 0:
            names.append(str(file.relative_to(folder)))
    return names


def _verify_part(checkpoint: SavedCheckpoint) -> None:
    """Verify checksums, each rank those of a part of the files; collective."""
    names = sorted(checkpoint.files)[dist.get_rank() :: dist.get_world_size()]
    all_ranks.run_on_all_ranks(
        lambda: checkpoint.verify(names), CheckpointError, "verifying checksums"
    )


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return trainable parameters and buffers, not copied; tied parameters once."""
    buffers = {n: x for n, x in parameter_shards(model).items() if not isinstance(x, DTensor)}
    return buffers | {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


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
