"""`setup.py` names everything that the build lacks, each with what to do, before it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INPUTS = (
    "setup.py",
    "CMakeLists.txt",
    "pyproject.toml",
    "tools",
    "csrc",
    "hybridengine",
    "kernels",
    "extras",
    "README.md",
    "LICENSE",
)


@pytest.fixture
def build(tmp_path):
    """A function that runs setup.py of a copy in an empty venv, and returns what it prints.

    packages: files of the venv's site-packages by their path. programs: those on PATH.
    """
    for name in INPUTS:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "setup.py").unlink()
    (tmp_path / "setup.py").write_text((ROOT / "setup.py").read_text())  # its folder is the root
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    [packages] = environment.glob("lib/python*/site-packages")
    own = Path(pytest.__file__).parents[1]
    for name in ("setuptools", "_distutils_hack", "setuptools-*.dist-info"):
        [found] = own.glob(name)
        (packages / found.name).symlink_to(found)

    def run(files: dict[str, str], programs: dict[str, str], **variables: str) -> str:
        for name, text in files.items():
            (packages / name).parent.mkdir(exist_ok=True)
            (packages / name).write_text(text)
        folder = tmp_path / "programs"
        folder.mkdir()
        for name, text in programs.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CXX"))}
        done = subprocess.run(
            [environment / "bin" / "python", "setup.py", "-q", "egg_info", "--egg-base", tmp_path],
            cwd=tmp_path,
            env=kept | {"PATH": str(folder)} | variables,
            text=True,
            capture_output=True,
        )
        return f"{done.stderr}exit {done.returncode}"

    return run


OLD_SETUPTOOLS = "import setuptools\nsetuptools.__version__ = '65.5.0'\n"
PYBIND11 = {"pybind11/__init__.py": ""}
TOOLS = {"cmake": "", "ninja": "", "c++": "#!/bin/sh\nexit 0\n"}


def test_an_empty_environment_lacks_all(build):
    text = build({"sitecustomize.py": OLD_SETUPTOOLS}, {})
    first, *faults, end = text.splitlines()
    assert (first, end) == ("hybridengine cannot be built here:", "exit 1")
    pybind11, setuptools, cmake, ninja, compiler = faults
    assert "pybind11 is not installed" in pybind11 and "pip install pybind11" in pybind11
    assert "65.5.0 is installed, 77 or newer" in setuptools and "'setuptools>=77'" in setuptools
    assert "pip install cmake" in cmake and "pip install ninja" in ninja
    assert compiler.startswith("no C++ compiler was found: install g++")


BROKEN = "#!/bin/sh\necho 'c++: fatal error: cannot execute cc1plus' >&2\nexit 1\n"


@pytest.mark.parametrize(
    ("packages", "programs", "variables", "fault"),
    [
        ({}, TOOLS, {}, "pybind11 is not installed"),
        (PYBIND11, {**TOOLS, "c++": BROKEN}, {}, "(c++: fatal error: cannot execute cc1plus)"),
        (PYBIND11, TOOLS, {"CXX": "/no/compiler -O1"}, "No such file or directory: '/no/compiler'"),
    ],
)
def test_one_fault_is_one_line(build, packages, programs, variables, fault):
    text = build(packages, programs, **variables)
    [_, line, end] = text.splitlines()
    assert fault in line and "install" in line and end == "exit 1"


def test_a_complete_environment_has_no_fault(build):
    assert build(PYBIND11, TOOLS).endswith("exit 0")
