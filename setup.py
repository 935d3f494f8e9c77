"""A thin shim over CMake: builds hybridengine._C and lists the packages.

`pip install .` (or `-e .`). HYBRIDENGINE_CUDA=AUTO|ON|OFF is passed on. AUTO builds the CUDA
kernels where nvcc is found, and torch has CUDA or an NVIDIA GPU is there.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import setuptools
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
BIN = Path(sys.executable).parent  # cmake and ninja of this Python, before those on PATH
SETUPTOOLS = 77  # the first that reads `project.license` as pyproject.toml has it
PROGRAM = "#include <omp.h>\n#include <vector>\nint main() { return std::vector<int>(1)[0]; }\n"


def missing() -> Iterator[str]:
    """Yield what the build lacks here, a sentence each, with what to do."""
    facts = [sys.executable, str(ROOT / "tools" / "build_facts.py")]
    done = subprocess.run(facts, text=True, capture_output=True)
    if done.returncode:
        yield done.stderr.strip()
    if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS:
        yield (
            f"setuptools {setuptools.__version__} is installed, {SETUPTOOLS} or newer is needed: "
            f"run `pip install 'setuptools>={SETUPTOOLS}'`."
        )
    for name in ("cmake", "ninja"):
        if tool(name) is None:
            yield f"{name} was not found: run `pip install {name}`."
    yield from compiler_faults()


def tool(name: str) -> str | None:
    return str(BIN / name) if (BIN / name).is_file() else shutil.which(name)


def compiler_faults() -> Iterator[str]:
    """Yield why there is no C++ compiler that builds a small program with OpenMP."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        yield "no C++ compiler was found: install g++ (such as `apt install g++`), or set CXX."
        return
    with tempfile.TemporaryDirectory() as folder:
        output = ["-fopenmp", "-x", "c++", "-", "-o", f"{folder}/program"]
        try:
            done = subprocess.run(
                [*shlex.split(compiler), *output], input=PROGRAM, text=True, capture_output=True
            )
            reason = done.stderr.strip() if done.returncode else None
        except OSError as error:
            reason = str(error)
    if reason is not None:
        cause = next((x for x in reason.splitlines() if "error" in x), reason or "it says nothing")
        yield (
            f"the C++ compiler {compiler} cannot compile a small program with OpenMP ({cause}): "
            "install g++ with its libraries (such as `apt install g++`), or set CXX to a compiler "
            "that works."
        )


def cause_of(log: str) -> str:
    """What CMake stopped with, or the end of the log."""
    message = re.search(r"CMake Error[^\n]*:\n\s*((?:  .*\n|\n)+)", log)
    return " ".join(message[1].split()) if message else "\n".join(log.splitlines()[-40:])


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        sys.stdout.flush()
        cmake = str(tool("cmake"))
        build_dir = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        output_dir = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        path = os.pathsep.join([str(BIN), os.environ.get("PATH", "")])
        jobs = os.environ.get("MAX_JOBS") or str(min(os.cpu_count() or 1, 8))
        cuda = os.environ.get("HYBRIDENGINE_CUDA", "AUTO")
        settings = {"PYTHON": sys.executable, "OUTPUT_DIR": output_dir, "CUDA": cuda}
        configure = [cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(build_dir)]
        configure += [f"-DHYBRIDENGINE_{name}={value}" for name, value in settings.items()]
        configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]  # pip moves it between builds
        commands = [configure, [cmake, "--build", str(build_dir), "-j", jobs]]
        for command in commands:
            done = subprocess.run(
                command, env={**os.environ, "PATH": path}, text=True, capture_output=True
            )
            if done.returncode:
                raise SystemExit(cause_of(done.stdout + done.stderr))
            print(done.stdout, end="")
        database = build_dir / "compile_commands.json"
        if database.is_file():
            shutil.copyfile(database, ROOT / "compile_commands.json")


# Before setup(): an old setuptools fails there, and pip downloads dependencies before it builds.
if faults := list(missing()):
    raise SystemExit("\n".join(["hybridengine cannot be built here:", *faults]))

# The folders beside hybridengine/ that are installed as a part of it.
BESIDE = {"kernels": "kernels", **{x.name: f"extras/{x.name}" for x in (ROOT / "extras").iterdir()}}

setup(
    packages=[
        *find_packages(include=["hybridengine", "hybridengine.*"]),
        *(f"hybridengine.{name}" for name in BESIDE),
        *(f"hybridengine.{a}.{b}" for a, folder in BESIDE.items() for b in find_packages(folder)),
    ],
    package_dir={f"hybridengine.{name}": folder for name, folder in BESIDE.items()},
    package_data={"": ["py.typed", "*.pyi", "*.yaml", "*.html"]},
    ext_modules=[Extension("hybridengine._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
