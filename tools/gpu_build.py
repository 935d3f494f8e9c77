"""Build the extension for the GPU of this machine, in place; the part `build` of gpu_report.py.

    python tools/gpu_build.py --json FILE [--arch 90a]

Takes the extension of the pack (HYBRIDENGINE_PACK, a folder of `make gpu-pack`) where it was built
from these sources for this Python and GPU, else compiles with cmake, ninja and nvcc, and imports
it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTENSION = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
IMPORT = "import torch; from hybridengine import _C"


def gpu_facts() -> list[dict[str, str]]:
    """Return name, driver_version and compute_cap of each GPU, without importing torch."""
    names = ("name", "driver_version", "compute_cap")
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.splitlines()
    return [dict(zip(names, line.split(", "), strict=True)) for line in lines if line]


def own_architecture() -> str:
    """The CUDA target of the first GPU; `a` is the set with Hopper's and Blackwell's own code."""
    major, minor = gpu_facts()[0]["compute_cap"].split(".")
    return f"{major}{minor}a" if int(major) >= 9 else f"{major}{minor}"


def described(architecture: str) -> dict[str, str]:
    """What an extension has to be built for and from, to be that of these sources."""
    return {"extension": EXTENSION, "architecture": architecture, "sources": hash_of_sources()}


def hash_of_sources() -> str:
    """Hash what the extension is compiled from."""
    return hash_of([ROOT / "CMakeLists.txt", *sorted((ROOT / "csrc").rglob("*.*"))])


def hash_of_kernels() -> str:
    """Hash what launches Triton kernels and what they are compiled from."""
    return hash_of(sorted((ROOT / "kernels").rglob("*.py")))


def hash_of(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def compile_extension(architecture: str) -> None:
    build = ROOT / "build" / "gpu" / sys.implementation.cache_tag
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    scripts = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": os.pathsep.join([scripts, os.environ["PATH"]])}
    for command in (
        [
            *("cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build)),
            *(f"-DHYBRIDENGINE_PYTHON={sys.executable}", "-DHYBRIDENGINE_CUDA=ON"),
            f"-DHYBRIDENGINE_CUDA_ARCHITECTURES={architecture}-real",
        ],
        ["cmake", "--build", str(build), "-j", jobs],
    ):
        subprocess.run(command, check=True, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--arch", metavar="SM", help="default: the GPU's, without a GPU 90a")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="changes nothing here")
    parser.add_argument("--resume", action="store_true", help="ninja always does")
    arguments = parser.parse_args()
    started = time.perf_counter()
    architecture = arguments.arch or (own_architecture() if arguments.device == "cuda" else "90a")
    needed = described(architecture)
    pack = Path(os.environ.get("HYBRIDENGINE_PACK", os.devnull))
    file = pack / "pack.json"
    packed = json.loads(file.read_text()) if file.is_file() else {}
    is_packed = all(packed.get(key) == value for key, value in needed.items())
    if is_packed:
        target = ROOT / "hybridengine" / EXTENSION
        copy = target.with_suffix(".new")  # a process that has the old one mapped keeps it
        shutil.copy2(pack / EXTENSION, copy).replace(target)
    else:
        compile_extension(architecture)
        subprocess.run([sys.executable, "-c", IMPORT], check=True, cwd=ROOT)
    seconds = round(time.perf_counter() - started, 1)
    row = {**needed, "compiled": not is_packed, "seconds": seconds}
    arguments.json.write_text(json.dumps({"rows": [row]}, indent=1) + "\n")
    print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
