"""Compile every CUDA and Triton kernel for every target and report its resource usage.

    python tools/cuda_check.py [--arch 90a ...]

csrc/*/*_cuda.cu needs nvcc only, no GPU and no torch; the Triton kernels are compiled if triton is
installed. Prints one line per kernel and target (registers, shared memory, stack, spills) and exits
with 1 if a kernel does not compile or spills registers.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = ("80", "90a", "100a")


class Kernel(NamedTuple):
    source: str
    name: str
    architecture: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def compile_source(nvcc: str, source: Path, architecture: str) -> tuple[str, list[Kernel]]:
    """Return an error message ("" for none) and the kernels of this file."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(nvcc, "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v"),
                *("-gencode", f"arch=compute_{architecture},code=sm_{architecture}"),
                *("-I", str(ROOT / "csrc"), "-c", str(source), "-o", f"{folder}/out.o"),
            ],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        return f"{source.relative_to(ROOT)} for sm_{architecture}:\n{done.stderr}", []
    return "", parse(done.stderr, source, architecture)


def parse(log: str, source: Path, architecture: str) -> list[Kernel]:
    """Return the entry functions of a ptxas -v log."""
    kernels = []
    name, stack, spills = "", 0, 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match[1]
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, spills = int(match[1]), int(match[2]) + int(match[3])
        elif name and (match := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            kernels.append(
                Kernel(
                    *(source.name, name, architecture, int(match[1])),
                    *(int(shared[1]) if shared else 0, stack, spills),
                )
            )
            name = ""
    return kernels


def demangle(kernels: list[Kernel]) -> list[Kernel]:
    if not kernels or shutil.which("c++filt") is None:
        return kernels
    names = subprocess.run(
        ["c++filt", "-p"], input="\n".join(k.name for k in kernels), capture_output=True, text=True
    ).stdout.splitlines()
    short = [re.sub(r"\(anonymous namespace\)::|hybridengine::|^void ", "", n) for n in names]
    return [k._replace(name=n) for k, n in zip(kernels, short, strict=True)]


def table(kernels: list[Kernel]) -> str:
    header = ("source", "kernel", "target", "registers", "shared", "stack", "spills")
    rows = [(k.source, k.name, f"sm_{k.architecture}", *(str(v) for v in k[3:])) for k in kernels]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    )


def compile_triton(architectures: list[str]) -> tuple[list[str], list[Kernel]]:
    """Compile every kernel of tools/triton_builds.py, if triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return [], []
    sys.path.insert(0, str(ROOT))
    from tools import triton_builds

    problems, kernels = [], []
    for architecture in architectures:
        for name, build in triton_builds.builds(int(architecture.rstrip("a"))).items():
            try:
                registers, shared, spills = build()
            except Exception as error:
                problems.append(f"triton kernel {name} for sm_{architecture}: {error}")
                continue
            kernels.append(Kernel("triton", name, architecture, registers, shared, 0, spills))
    return problems, kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), metavar="SM")
    architectures = parser.parse_args().arch
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        print("cuda-check: nvcc is not installed: add it to PATH or set CUDACXX.", file=sys.stderr)
        return 1
    sources = sorted((ROOT / "csrc").glob("*/*_cuda.cu"))
    jobs = [(source, architecture) for source in sources for architecture in architectures]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = list(pool.map(lambda job: compile_source(nvcc, *job), jobs))
    problems = [problem for problem, _ in results if problem]
    kernels = demangle([kernel for _, of_file in results for kernel in of_file])
    triton_problems, triton = compile_triton(architectures)
    problems += triton_problems
    kernels += triton
    print(table(kernels))
    spilling = [k for k in kernels if k.spill_bytes]
    problems += [f"{k.name} for sm_{k.architecture} spills {k.spill_bytes} bytes" for k in spilling]
    print(
        f"\n{len(sources)} sources, {len(kernels)} kernels, targets "
        + ", ".join(f"sm_{a}" for a in architectures)
        + f": {len(problems)} problems"
    )
    for problem in problems:
        print(f"cuda-check: {problem}", file=sys.stderr)
    return 1 if problems or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
