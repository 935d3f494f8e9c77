"""Compile a CUDA source of csrc for the CPU: a test runs the kernels and their launches there."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "csrc"
LAUNCH = re.compile(r"(\w+(?:<[^;{}]*?>)?)\s*<<<(.*?)>>>\(([\w, ]+)\);", re.DOTALL)


def compile_for_cpu(cuda_source: str, check: Path, folder: Path) -> ctypes.CDLL:
    """Return the library of `check`, a C++ file that includes `cuda_source` (in csrc) by name."""
    text = (CSRC / cuda_source).read_text()
    emulated, launches = LAUNCH.subn(r"emulate([&] { \1(\3); }, \2);", text)
    assert launches and "<<<" not in emulated
    (folder / Path(cuda_source).name).write_text(emulated)
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    library = folder / "check.so"
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O1",
            "-DHYBRIDENGINE_ISA=check",
            "-shared",
            "-fPIC",
            f"-I{HERE}",
            f"-I{folder}",
            f"-I{CSRC}",
            check,
            "-o",
            library,
        ],
        check=True,
    )
    return ctypes.CDLL(str(library))
