"""Archives for a GPU machine: whole or not there, and compressed anew only where they changed."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import re
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PRESET = 9  # of xz
LEFT_OUT = re.compile(r"/__pycache__|\.source$")  # bytecode; sources of compiled Triton kernels
Members = Sequence[tuple[Path, str]]  # a file or folder, and its name in the archive


def write_groups(archive: Path, groups: Mapping[str, Members], known: Path) -> list[str]:
    """Write an archive of groups; return the names of those that `known` does not have.

    Each is an xz stream of its own, one after the other: together they are one .tar.xz. `known` is
    a folder that keeps the streams for the next archive, which has its name only once it is whole.
    """
    known.mkdir(parents=True, exist_ok=True)
    tars = {name: _members(members) for name, members in groups.items()}
    tars["end"] = bytes(tarfile.RECORDSIZE)
    files = {n: known / f"{hashlib.sha256(data).hexdigest()}.xz" for n, data in tars.items()}
    new = [name for name, file in files.items() if not file.is_file()]

    def compress(name: str) -> None:
        part = files[name].with_suffix(".part")
        part.write_bytes(lzma.compress(tars[name], preset=PRESET))
        part.replace(files[name])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compress, new))
    part = archive.with_name(f"{archive.name}.part")
    part.write_bytes(b"".join(files[name].read_bytes() for name in tars))
    part.replace(archive)
    for old in {*known.iterdir()} - {*files.values()}:
        old.unlink()
    return [name for name in new if name in groups]


def _members(members: Members) -> bytes:
    """Return a tar of the members without its end. Equal files give equal bytes."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for path, name in members:
            tar.add(path, name, filter=_plain)
        end = tar.offset
    return data.getvalue()[:end]


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if LEFT_OUT.search(info.name):
        return None
    return info.replace(mtime=0, uid=0, gid=0, uname="", gname="", deep=False)
