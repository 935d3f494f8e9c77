"""Read the metadata of DCP's checkpoints, which DCP pickles, without running code.

torch's own reader calls `pickle.load`, which runs whatever a file names. Here a file may name only
the classes of DCP's metadata and their fields. Its tensors are read with `weights_only=True` by
torch itself; entries other than tensors, which torch would unpickle, are refused.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata, filesystem, metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hybridengine.run.errors import CheckpointError

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
