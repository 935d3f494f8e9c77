"""DCP's metadata is read without running what a file names."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from hybridengine.run.errors import CheckpointError
from hybridengine.train.checkpoint.tensors import MetadataReader
from tests.train.checkpoint.hostile import hostile_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

TENSORS = {
    "actor/model/weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "actor/model/ids": torch.tensor([1, 2]),
    "actor/optim/step": torch.tensor(3.0),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(dict(TENSORS), checkpoint_id=tmp_path / "tensors", no_dist=True)
    return tmp_path / "tensors"


def test_the_metadata_is_what_torch_reads(folder: Path) -> None:
    assert MetadataReader(folder).read_metadata() == replace(
        dcp.FileSystemReader(folder).read_metadata(),
        storage_meta=MetadataReader(folder).read_metadata().storage_meta,
    )
    loaded = {name: torch.zeros_like(x) for name, x in TENSORS.items()}
    dcp.load(loaded, storage_reader=MetadataReader(folder), no_dist=True)
    assert all(torch.equal(loaded[name], x) for name, x in TENSORS.items())


def test_every_dtype_and_layout_is_read(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float16, torch.bool, torch.uint8, torch.float8_e4m3fn]
    named = {str(dtype): torch.zeros(2, dtype=dtype) for dtype in dtypes}
    dcp.save(named, checkpoint_id=tmp_path / "tensors", no_dist=True)
    entries = MetadataReader(tmp_path / "tensors").read_metadata().state_dict_metadata
    assert [entries[str(dtype)].properties.dtype for dtype in dtypes] == dtypes


def test_metadata_that_runs_code_is_refused(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for what, content in hostile_metadata(ran):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata of tensors cannot be read"):
            MetadataReader(folder)
        assert not ran.exists(), what


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (BytesStorageMetadata(), "BytesStorageMetadata"),
        (torch.Size([2]), "'actor/model/ids' is not a tensor"),  # of a class that is admitted
    ],
)
def test_entries_that_torch_would_unpickle_are_refused(
    folder: Path, entry: object, message: str
) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    metadata.state_dict_metadata["actor/model/ids"] = entry
    with pytest.raises(CheckpointError, match=message):
        _write_and_read(folder, metadata)


@pytest.mark.parametrize("path", ["../other/__0_0.distcp", "/etc/passwd", ".."])
def test_files_outside_the_folder_are_refused(folder: Path, path: str) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, relative_path=path)
    with pytest.raises(CheckpointError, match="not a data file of this folder"):
        _write_and_read(folder, metadata)


def test_anything_else_is_refused(folder: Path) -> None:
    for content in (b"", b"\x80\x04", pickle.dumps([1]), pickle.dumps(None)):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            MetadataReader(folder)


def _write_and_read(folder: Path, metadata: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    MetadataReader(folder)
