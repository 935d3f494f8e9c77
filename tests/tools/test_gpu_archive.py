"""Archives of a GPU machine: made anew where their files changed, and of these sources."""

from __future__ import annotations

import importlib
import json
import lzma
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tools import gpu_archive, gpu_build


def test_only_groups_that_changed_are_compressed_again(tmp_path, monkeypatch):
    folder, archive, known = tmp_path / "site", tmp_path / "pack.tar.xz", tmp_path / "known"
    for name in ("a.py", "__pycache__/a.pyc", "a.source"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    single = tmp_path / "single"
    single.write_text("one")
    groups = {"folder": [(folder, "site")], "single": [(single, "single")]}

    def write() -> list[str]:
        return gpu_archive.write_groups(archive, groups, known)

    def read(name: str) -> bytes:
        with tarfile.open(archive) as file:
            assert file.getnames() == ["site", "site/a.py", "single"]
            return file.extractfile(name).read()

    assert write() == ["folder", "single"]
    assert read("site/a.py") == b"a.py" and read("single") == b"one"
    os.utime(single, (1, 1))
    assert write() == []
    single.write_text("two")
    monkeypatch.setattr(lzma, "compress", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write()
    assert read("single") == b"one", "one that is not whole leaves the one before"
    monkeypatch.undo()
    assert write() == ["single"] and read("single") == b"two" and len([*known.iterdir()]) == 3


@pytest.fixture
def rehearsal(tmp_path, monkeypatch):
    """tools/gpu_rehearsal.py on a repository of one file."""
    monkeypatch.syspath_prepend(str(Path(gpu_build.__file__).parent))
    module = importlib.import_module("gpu_rehearsal")
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / "file").write_text("one")
    paths = {"ROOT": root, "WORK": tmp_path, "TREE": tmp_path / "tree"}
    paths |= {name: root / f"{name}.tar.xz" for name in ("PACK", "VLLM")}
    for name, path in paths.items():
        monkeypatch.setattr(module, name, path)
    monkeypatch.setattr(module, "folders_beside", list)
    return module


def test_a_copy_of_the_sources_is_new_where_they_changed_alone(rehearsal):
    file, copy = rehearsal.ROOT / "file", rehearsal.TREE / "file"
    os.utime(file, (1, 1))
    rehearsal.copy_sources()
    os.utime(copy, (2, 2))
    rehearsal.copy_sources()
    assert copy.stat().st_mtime == 2 and copy.read_text() == "one"
    file.write_text("two")
    os.utime(file, (2, 2))  # git keeps no times: they say nothing
    rehearsal.copy_sources()
    assert copy.stat().st_mtime > 2 and copy.read_text() == "two"


def test_archives_of_other_sources_or_too_large_ones_are_not_ready(rehearsal, monkeypatch):
    monkeypatch.setattr(rehearsal.gpu_build, "hash_of_sources", lambda: "s")
    monkeypatch.setattr(rehearsal.gpu_build, "hash_of_kernels", lambda: "k")
    described = rehearsal.WORK / "pack.json"

    def write(**facts: str) -> None:
        described.write_text(json.dumps({"commit": "c0ffee", **facts}))
        groups = {"description": [(described, "pack.json")]}
        rehearsal.write_archive(rehearsal.PACK, groups, "test")

    with pytest.raises(SystemExit, match=r"PACK.tar.xz is not there"):
        rehearsal.ready()
    rehearsal.VLLM.touch()
    write(sources="s", kernels="old")
    with pytest.raises(
        SystemExit, match=r"ready: Triton kernels of the pack, made at c0ffee, are not"
    ):
        rehearsal.ready()
    write(sources="s", kernels="k")
    rehearsal.ready()
    monkeypatch.setattr(rehearsal, "CARRIED_MIB", 0)
    with pytest.raises(SystemExit, match=r"MiB, more than 0"):
        rehearsal.ready()
