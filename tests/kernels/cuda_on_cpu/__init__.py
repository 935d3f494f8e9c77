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
    return compile_check(check, folder, "-std=c++17", "-DHYBRIDENGINE_ISA=check", f"-I{HERE}")


def compile_check(check: Path, folder: Path, *options: str) -> ctypes.CDLL:
    """Return the library of a C++ file that includes headers of csrc, or files of `folder`."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    library = folder / "check.so"
    common = ["-O1", "-shared", "-fPIC", f"-I{folder}", f"-I{CSRC}", "-o", library]
    subprocess.run([compiler, *options, check, *common], check=True)
    return ctypes.CDLL(str(library))
