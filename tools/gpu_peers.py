"""Baselines for a GPU machine without a network: CuTe-DSL, quack, FlashAttention 4, trainers' own.

A step of gpu_rehearsal.py. The archive has their packages without what a benchmark does not load,
and their kernels, compiled for one GPU by gpu_peers_compile.py. Most of it is the compiler of
CuTe-DSL, 260 MB in few pieces; the archive is cut into parts that fit a transfer each.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGES = (
    *("quack-kernels==0.6.5", "flash-attn-4==4.0.0b36", "einops==0.8.2"),
    *("apache-tvm-ffi==0.1.15.post2", "nvidia-cutlass-dsl==4.8.1"),
    *(f"nvidia-cutlass-dsl-libs-{part}==4.8.1" for part in ("base", "core", "cu13")),
    *("datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0"),  # of TRL
)
REQUIREMENTS = Path(__file__).with_name("baselines.txt")
LEFT_OUT = re.compile(r"\.a$|/stubs/|/iket/(profiler/|\w+\.so)|tvm_ffi/(3rdparty|include)/")
PART_MIB = 40
FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20},
]


# What gpu_report.py sets; folders are those of the archive. quack imports only from a folder named
# `site-packages`. The second path is that of a .pth file.
ENVIRONMENT: dict[str, Any] = {
    "paths": ["site-packages", "site-packages/nvidia_cutlass_dsl/dsl_packages"],
    "folders": {
        "QUACK_CACHE_DIR": "cache/quack",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "cache/flash_attn",
    },
    "values": {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"},
}


def write(python: Path, work: Path, sources: list[Path], archive: Path, architecture: int) -> None:
    """Write the parts of `archive`, ARCHIVE.0 and on, for the Python of `python`.

    work: folder for downloads.
    sources: the built sources, whose benchmarks compile the kernels, and their packages.
    """
    wheels, folder = work / "peers-wheels", work / "peers"
    shutil.rmtree(folder, ignore_errors=True)
    make = (python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels)
    subprocess.run([*make, *PACKAGES, "-r", REQUIREMENTS], check=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as files:
            names = [name for name in files.namelist() if not LEFT_OUT.search(name)]
            files.extractall(folder / "site-packages", names)
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT, indent=1) + "\n")
    compile_kernels(python, folder, sources, architecture)
    for old in archive.parent.glob(f"{archive.name}.*"):
        old.unlink()
    whole = work / archive.name
    with lzma.open(whole, "wb", filters=FILTERS) as packed, tarfile.open(None, "w", packed) as file:
        for name in ("environment.json", "site-packages", "cache"):
            file.add(folder / name, name, filter=_without_caches)
    data = whole.read_bytes()
    for index, begin in enumerate(range(0, len(data), PART_MIB << 20)):
        part = archive.with_name(f"{archive.name}.{index}")
        part.write_bytes(data[begin : begin + (PART_MIB << 20)])
        print(f"gpu-peers: {part}, {part.stat().st_size / 2**20:.1f} MiB")


def _without_caches(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out bytecode, and the locks of compiled kernels."""
    return None if "__pycache__" in info.name or info.name.endswith(".lock") else info


def compile_kernels(python: Path, folder: Path, sources: list[Path], architecture: int) -> None:
    target = f"sm_{architecture}"
    paths = [*sources, *(folder / path for path in ENVIRONMENT["paths"])]
    variables = ENVIRONMENT["values"] | {
        **{name: str(folder / path) for name, path in ENVIRONMENT["folders"].items()},
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUTE_DSL_ARCH": f"{target}a",
        "QUACK_ARCH": target,
        "FLASH_ATTENTION_ARCH": target,
        "FLASH_ATTENTION_NUM_SMS": "132",
    }
    command = [str(python), "tools/gpu_peers_compile.py"]
    subprocess.run(command, cwd=sources[0], env=os.environ | variables, check=True)
