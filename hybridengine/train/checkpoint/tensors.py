"""The tensors of a checkpoint: trainable parameters, buffers and Adam's moments, written by DCP.

They are named `<model>/model/<name>` and `<model>/optim/<name>`. Models on the ranks of the job's
own world share the folder `tensors`; one on other ranks has `tensors_<model>`. A model is read from
wherever it was written.

`torch.distributed.checkpoint.state_dict` is not used: it saves a tied head twice, also a frozen one
under LoRA; it starts Adam's step at 1 if no update was made; and loading its optimizer state
overwrites a learning rate or weight decay that the configuration has changed.

DCP pickles the metadata of a checkpoint, and torch's own reader calls `pickle.load`, which runs
whatever a file names. `MetadataReader` admits the classes of DCP's metadata and their fields only.
torch itself reads the tensors with `weights_only=True`; entries other than tensors, which torch
would unpickle, are refused.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, Metadata, filesystem, metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hybridengine.model.fsdp import on_device
from hybridengine.model.optim import Optimizer
from hybridengine.model.parameters import frozen_parameters, is_finite, parameter_shards
from hybridengine.run import messages
from hybridengine.run.errors import CheckpointError
from hybridengine.run.storage import file_records, writing_to
from hybridengine.sync.shards import local_shard, with_shard

TENSORS = "tensors"  # the folder of a checkpoint that DCP writes

_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")
_LAYOUTS = {str(layout): layout for layout in vars(torch).values() if type(layout) is torch.layout}
_ADMITTED: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    **{
        ("torch", str(x).removeprefix("torch.")): x
        for x in vars(torch).values()
        if type(x) is torch.dtype
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
    ("pathlib", "PosixPath"): PurePosixPath,  # the path that the checkpoint was written to
    ("pathlib._local", "PosixPath"): PurePosixPath,  # of Python 3.13
}


class MetadataReader(FileSystemReader):
    """Reads a folder of DCP; its metadata is read at once.

    Raises:
        CheckpointError: the metadata cannot be read, contains anything but DCP's metadata of
            tensors, or names a file outside the folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        file = folder / ".metadata"
        try:
            with file.open("rb") as source:
                self._metadata = _checked(_Unpickler(source).load())
        except Exception as error:  # a damaged pickle raises anything
            raise CheckpointError(
                f"checkpoint {folder.parent}: {file.name} of {folder.name} cannot be read: {error}"
            ) from None

    def read_metadata(self) -> Metadata:  # without a rank: one file describes the tensors of all
        return self._metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is not part of DCP's metadata; a file that was made "
            "to run code does so"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it has a persistent id, which DCP's metadata has not")


def _checked(loaded: Any) -> Metadata:
    """Return `loaded` if it is metadata of tensors in files of one folder, else raise."""
    if type(loaded) is not Metadata:
        raise ValueError(f"it is of type {type(loaded).__name__}, expected DCP's Metadata")
    for name, entry in loaded.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata:  # torch would unpickle it
            raise ValueError(f"{name!r} is not a tensor")
    for info in loaded.storage_data.values():
        if not _DATA_FILE.fullmatch(info.relative_path) or info.transform_descriptors:
            raise ValueError(f"{info.relative_path!r} is not a data file of this folder")
    return loaded


class RemotePart(Protocol):
    """A model whose ranks are another world; they write and read its tensors themselves.

    num_bytes: the bytes of all its tensors.
    """

    name: str
    num_bytes: int

    def save(self, folder: Path) -> None:
        """Start to write the tensors into a checkpoint. Collective."""

    def saved(self, folder: Path) -> Mapping[str, list[int]]:
        """Wait until `save` has written; return the record of every file. On one rank."""
        ...

    def load(self, folder: Path) -> None:
        """Load the tensors of a checkpoint. Collective."""


class _Writer(dcp.FileSystemWriter):
    """Writes the tensors of one rank, limited by its progress."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy all tensors to host memory, a DTensor's once; torch's stager copies it twice."""
        self.per_thread_copy_ahead = 0  # a buffer for tensors of a device
        own = {name: local_shard(x).detach().to("cpu", copy=True) for name, x in state_dict.items()}
        return {name: with_shard(x, own[name]) for name, x in state_dict.items()}

    def write_data(self, *args: Any) -> Any:
        with writing_to(Path(self.path)):
            return super().write_data(*args)


class TensorFiles:
    """Writes and reads the tensors of `models` (by name, each with its optimizer) of one world.

    name: that of the folder that it writes. All methods are collective over all ranks.
    """

    def __init__(
        self, models: Mapping[str, tuple[nn.Module, Optimizer | None]], name: str = TENSORS
    ) -> None:
        self._models, self._name = models, name
        # A save runs concurrently with training. These collectives wait for a write on another
        # rank without a limit: the monitor of that rank limits its write, see `storage`.
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=365))

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensors of all ranks."""
        return sum(x.numel() * x.itemsize for x in self._tensors().values())

    def save(self, folder: Path, prepare: Callable[[], None] = lambda: None) -> Future[Any]:
        """Copy all tensors to host memory; return the future of their way into the checkpoint.

        prepare: called first, while the models are on the device.
        """
        with self._on_device() as tensors:
            prepare()
            saving = dcp.async_save(
                tensors, storage_writer=_Writer(folder / self._name), process_group=self.group
            )
            assert isinstance(saving, Future)
            return saving

    def records(self, folder: Path, files: Iterable[Path], doing: str) -> dict[str, list[int]]:
        """Return the record of each of `files`, by its name in the checkpoint, from all ranks.

        A rank reads what it has written, rank 0 also files without a rank in the name. doing: what
        a CheckpointError says has failed.
        """

        def own_records() -> dict[str, list[int]]:
            with writing_to(folder):
                return file_records(folder, _files_of_rank(folder, files))

        own = messages.run_on_all_ranks(own_records, CheckpointError, doing, self.group)
        parts = messages.all_gather_values(own, dict[str, list[int]], self.group)
        return {name: record for part in parts for name, record in part.items()}

    def load(self, folder: Path) -> None:
        """Load the tensors of a checkpoint; raise CheckpointError if they do not fit."""
        doing = f"loading checkpoint {folder}"
        with self._on_device() as tensors:
            for source in sorted({_source(folder, part) for part in self._models}):
                wanted = {
                    name: x
                    for name, x in tensors.items()
                    if _source(folder, name.partition("/")[0]) == source
                }
                reader = messages.run_on_all_ranks(
                    partial(MetadataReader, source), CheckpointError, doing, self.group
                )
                try:
                    dcp.load(wanted, storage_reader=reader, process_group=self.group)
                except dcp.CheckpointException as error:
                    reason = next(iter(error.failures.values()))[0]
                    raise CheckpointError(
                        f"checkpoint {folder} does not fit this job: {reason}"
                    ) from error
            self._check_finite(doing, tensors)

    def _check_finite(self, doing: str, tensors: Mapping[str, torch.Tensor]) -> None:
        trained = {
            f"{part}/model/{name}"
            for part, (model, _) in self._models.items()
            for name, _ in model.named_parameters()
        }
        name = next((n for n, x in tensors.items() if n in trained and not is_finite(x)), None)
        messages.raise_on_all_ranks(
            name
            and f"{name} contains NaN or infinity; resume from an older one with "
            "trainer.resume_mode=path",
            CheckpointError,
            doing,
        )

    @contextmanager
    def _on_device(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield `_tensors` while they are on the device."""
        with ExitStack() as stack:
            for model, optimizer in self._models.values():
                stack.enter_context(on_device(model))
                if optimizer:
                    stack.enter_context(optimizer.offloader.on_device())
            yield self._tensors()

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save or load, by their names in the checkpoint."""
        tensors: dict[str, torch.Tensor] = {}
        for part, (model, optimizer) in self._models.items():
            moments = optimizer.moments() if optimizer else {}
            for kind, named in (("model", _model_tensors(model)), ("optim", moments)):
                tensors |= {f"{part}/{kind}/{name}": x for name, x in named.items()}
        return tensors


def remote_folder(name: str) -> str:
    """Return the name of the folder of a model on ranks of another world."""
    return f"{TENSORS}_{name}"


def _files_of_rank(folder: Path, files: Iterable[Path]) -> list[str]:
    rank, pattern = dist.get_rank(), re.compile(r"__(\d+)_\d+\.distcp|random_(\d+)\.pt")
    names = []
    for file in (f for f in files if f.is_file()):
        match = pattern.fullmatch(file.name)
        if int(match[1] or match[2]) == rank if match else rank == 0:
            names.append(str(file.relative_to(folder)))
    return names


def _source(folder: Path, part: str) -> Path:
    """Return where a checkpoint has the tensors of a model."""
    own = folder / remote_folder(part)
    return own if own.is_dir() else folder / TENSORS


def reason_of(error: BaseException) -> str:
    """Return why a save failed, as the end of a sentence; with the rank where DCP names it."""
    if isinstance(error, dcp.CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f" on rank {rank}: {cause}"
    return f": {error}"


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, not copied, tied ones once; under LoRA without its base."""
    shards = parameter_shards(model)
    if not hasattr(model, "peft_config"):
        return shards
    frozen = frozen_parameters(model)
    buffers = {n: x for n, x in shards.items() if n not in frozen}
    return buffers | {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
