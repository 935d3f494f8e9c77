"""Code for other GPUs is zeroed in a library of vLLM, and nothing else changes; the archive."""

from __future__ import annotations

import random
import struct
import tarfile
from pathlib import Path

import pytest

from tools.gpu_vllm import ELF, MAGIC, PTX, Code, fat_binaries, of_architecture, written

HEADER = 64  # of an entry


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    fields = struct.pack("<HHIQIIHHI", kind, 1, HEADER, len(code), 0, 0, 0, 0, architecture)
    return fields.ljust(HEADER, b"\0") + code


def binary(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(content)) + content


def test_the_entries_of_each_fat_binary_are_found_behind_padding() -> None:
    code = [random.Random(i).randbytes(8 * (i + 1)) for i in range(3)]
    first = binary(entry(ELF, 80, code[0]), entry(ELF, 90, code[1]))
    data = bytes(8) + first + bytes(16) + binary(entry(PTX, 80, code[2]))
    found = [*fat_binaries(data, 0, len(data))]
    assert [[e[:2] for e in entries] for entries in found] == [[(2, 80), (2, 90)], [(1, 80)]]
    codes = [data[e.offset : e.offset + e.size] for entries in found for e in entries]
    assert codes == code


def test_a_gpu_runs_its_own_code_and_else_ptx_that_is_no_newer() -> None:
    choose = of_architecture(90)
    own, older, newer = Code(ELF, 90, 0, 1), Code(ELF, 80, 1, 1), Code(ELF, 100, 2, 1)
    ptx, newer_ptx = Code(PTX, 80, 3, 1), Code(PTX, 100, 4, 1)
    assert choose([older, own, newer, ptx]) == [own]
    assert choose([older, newer, ptx, newer_ptx]) == [ptx]
    assert choose([older, newer]) == []


def test_an_archive_that_is_not_whole_leaves_the_one_before(tmp_path: Path) -> None:
    archive = tmp_path / "site.tar.xz"
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        with written(archive) as file:
            file.add(tmp_path / name, name)
        with pytest.raises(KeyboardInterrupt), written(archive) as file:
            file.add(tmp_path / name, "broken")
            raise KeyboardInterrupt
        with tarfile.open(archive) as file:
            assert file.getnames() == [name]
