"""A thin shim over CMake: builds hybridengine._C and lists the packages.

`pip install --no-build-isolation .` (or `-e .`). HYBRIDENGINE_CUDA=AUTO|ON|OFF is passed on.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def tool(name: str, advice: str) -> str:
    beside_python = Path(sys.executable).parent / name
    found = str(beside_python) if beside_python.is_file() else shutil.which(name)
    if found is None:
        raise SystemExit(f"hybridengine: {name} was not found: {advice}.")
    return found


def cause_of(log: str) -> str:
    """The sentence that CMakeLists.txt stopped with, or the end of the log."""
    message = re.search(r"CMake Error at [^\n]*\(message\):\n\s*((?:  .*\n)+)", log)
    return " ".join(message[1].split()) if message else "\n".join(log.splitlines()[-40:])


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        sys.stdout.flush()
        cmake = tool("cmake", "run `pip install cmake`")
        tool("ninja", "run `pip install ninja`")
        if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
            raise SystemExit("hybridengine: no C++ compiler was found: install g++ or set CXX.")
        build_dir = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        output_dir = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        jobs = os.environ.get("MAX_JOBS") or str(min(os.cpu_count() or 1, 8))
        cuda = os.environ.get("HYBRIDENGINE_CUDA", "AUTO")
        settings = {"PYTHON": sys.executable, "OUTPUT_DIR": output_dir, "CUDA": cuda}
        configure = [cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(build_dir)]
        configure += [f"-DHYBRIDENGINE_{name}={value}" for name, value in settings.items()]
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


setup(
    packages=[
        *find_packages(include=["hybridengine", "hybridengine.*"]),
        "hybridengine.kernels",
        *(f"hybridengine.kernels.{name}" for name in find_packages("kernels")),
    ],
    package_dir={"hybridengine.kernels": "kernels"},
    package_data={"hybridengine": ["py.typed", "*.pyi", "**/*.yaml"]},
    ext_modules=[Extension("hybridengine._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
