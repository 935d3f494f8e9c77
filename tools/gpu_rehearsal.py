"""Rehearse `gpu_report.py` without a GPU, with the software of a GPU machine; make its archives.

    python tools/gpu_rehearsal.py [STEP ...]

    environment  Python 3.12 with the packages of tools/gpu_environment.txt
    build        the extension for sm_90a
    triton       compiled Triton kernels of the GPU tests, for the pack (tools/triton_cache.py)
    pack         build/gpu-pack.tar.xz: the extension, packages that environment lacks, the kernels
    vllm         build/gpu-vllm.tar.xz: vLLM and what it imports; not by default (tools/gpu_vllm.py)
    peers        build/gpu-peers.tar.xz.0 and on: baselines; not by default
    kernels      every CUDA and Triton kernel compiles for sm_90a, without spills
    imports      every module, in the bare environment and with the pack
    collect      the GPU tests, in the bare environment
    report       all parts of the report on the CPU, from the pack; GPU tests up to the device
    calls        tools/gpu_calls/1.sh and 2.sh on the CPU; not by default
    ready        whether the archives are of these sources, in seconds; not by default

All others are the default, on a copy of the sources as git has them, in .cache/gpu-rehearsal. Needs
Python 3.12 (PYTHON, or python3.12 on PATH) and nvcc (CUDACXX, or on PATH). TORCH: another version
of torch than that of gpu_environment.txt, with its Triton. Exits with 1 if a step failed; the steps
after the pack all run.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from collections import defaultdict
from pathlib import Path

import gpu_archive
import gpu_build
import gpu_peers
import gpu_vllm
from package_links import folders_beside

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".cache" / "gpu-rehearsal"
TREE, SITE = WORK / "tree", WORK / "site"
PYTHON = WORK / "venv" / "bin" / "python"
PACK, VLLM = (ROOT / "build" / f"gpu-{name}.tar.xz" for name in ("pack", "vllm"))
TRITON = WORK / "triton"
KERNELS = WORK / "triton-kernels.sha256"  # of the sources that TRITON is of
REQUIREMENTS = ROOT / "tools" / "gpu_environment.txt"
ARCHITECTURE = "90a"
LIMIT_MIB = 28  # of the pack
CARRIED_MIB = 64  # of the archives and the sources


def environment() -> None:
    wanted = REQUIREMENTS.read_text()
    if version := os.environ.get("TORCH"):
        wanted = re.sub(r"^torch==\S+", f"torch=={version}", wanted, flags=re.MULTILINE)
    stamp, key = WORK / "environment.stamp", hashlib.sha256(wanted.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == key:
        return
    stamp.unlink(missing_ok=True)
    shutil.rmtree(TREE / "build", ignore_errors=True)  # of another torch
    call(find_python(), "-m", "venv", "--clear", WORK / "venv", cwd=ROOT)
    requirements = WORK / "requirements.txt"
    requirements.write_text(wanted)
    pip("install", "-q", "-r", requirements)
    stamp.write_text(key)


def find_python() -> str:
    """The first Python 3.12 of PYTHON, python3.12 and python3."""
    code = "import sys, venv; print(sys.executable if sys.version_info[:2] == (3, 12) else '')"
    environment = os.environ | {"PYENV_VERSION": "3.12"}  # pyenv's python3.12 needs it chosen
    for name in filter(None, (os.environ.get("PYTHON"), "python3.12", "python3")):
        if path := shutil.which(name):
            command = [path, "-c", code]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.stdout.strip():
                return done.stdout.strip()
    sys.exit("gpu-rehearsal: Python 3.12 was not found: install it, or set PYTHON to it.")


def build() -> None:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        sys.exit("gpu-rehearsal: nvcc was not found: put it on PATH, or set CUDACXX.")
    call(
        PYTHON,
        "tools/gpu_build.py",
        *("--arch", ARCHITECTURE),
        "--json",
        WORK / "build.json",
        CUDACXX=nvcc,
        HYBRIDENGINE_PACK="",
    )


def copy_sources() -> None:
    """Bring TREE up to date: what git tracks or would, no build, cache or virtual environment.

    By content: git does not keep times. A copy that changed is new, so that what was built of the
    one before is built again.
    """
    files = tracked()
    known = WORK / "files.json"
    for old in json.loads(known.read_text()) if known.is_file() else []:
        if Path(old) not in files:
            (TREE / old).unlink(missing_ok=True)
    for file in files:
        source, copy = ROOT / file, TREE / file
        if not (copy.is_file() and filecmp.cmp(source, copy, shallow=False)):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    known.write_text(json.dumps(sorted(map(str, files))))
    for folder in folders_beside():  # as gpu_report.py links them
        link = TREE / "hybridengine" / folder.name
        if not link.is_symlink():
            link.symlink_to(TREE / folder.relative_to(ROOT))


def tracked() -> set[Path]:
    """The files that git tracks or would."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {Path(n) for n in names.split("\0") if n and (ROOT / n).is_file()}


def triton() -> None:
    """Compile what the GPU tests launch. What the cache has of an earlier call stays."""
    limit_s = os.environ.get("TRITON_LIMIT_S", "3600")
    capability = int(ARCHITECTURE.rstrip("af"))
    command = (PYTHON, "tools/triton_cache.py", TRITON, "--limit-s", limit_s)
    install_missing()
    call(*command, "--capability", capability, PYTHONPATH=f"{TREE}{os.pathsep}{SITE}")
    if json.loads((TRITON / "cache.json").read_text())["complete"]:
        KERNELS.write_text(gpu_build.hash_of_kernels())


def install_missing() -> list[str]:
    """Install in SITE what the trainer needs beside the environment; return it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    report = WORK / "missing.json"
    wanted = project["optional-dependencies"]["train"]
    pip("install", "-q", "--dry-run", "--report", report, *wanted)
    missing = [found["metadata"] for found in json.loads(report.read_text())["install"]]
    exact = sorted(f"{found['name']}=={found['version']}" for found in missing)
    stamp = SITE / "installed.json"
    if not stamp.is_file() or json.loads(stamp.read_text()) != exact:
        shutil.rmtree(SITE, ignore_errors=True)
        pip("install", "-q", "--no-deps", "--target", SITE, *exact)
        stamp.write_text(json.dumps(exact))
    return exact


def pack() -> None:
    exact = install_missing()
    (row,) = json.loads((WORK / "build.json").read_text())["rows"]
    described = WORK / "pack.json"
    kernels = KERNELS.read_text() if KERNELS.is_file() else ""
    facts = {**row, "commit": commit(), "kernels": kernels}
    described.write_text(json.dumps(facts, indent=1) + "\n")
    groups: dict[str, gpu_archive.Members] = {
        "description": [(described, "pack.json")],
        "extension": [(TREE / "hybridengine" / row["extension"], row["extension"])],
        "site": [(SITE, "site")],
        **compiled_by_kernel(),
    }
    write_archive(PACK, groups, "with " + ", ".join(exact))
    mib = PACK.stat().st_size / 2**20
    if mib > LIMIT_MIB:
        sys.exit(f"gpu-rehearsal: the pack has {mib:.0f} MiB, more than {LIMIT_MIB}: drop a wheel.")


def compiled_by_kernel() -> dict[str, gpu_archive.Members]:
    """The entries of Triton's cache by the name of their kernel: one of them compresses best."""
    groups = defaultdict[str, list[tuple[Path, str]]](list)
    for entry in sorted(TRITON.iterdir()) if TRITON.is_dir() else []:
        name = next((file.stem for file in entry.glob("*.cubin")), "launchers")
        groups[f"triton {name}"].append((entry, f"triton/{entry.name}"))
    return dict(groups)


def write_archive(archive: Path, groups: dict[str, gpu_archive.Members], what: str) -> None:
    archive.parent.mkdir(exist_ok=True)
    new = gpu_archive.write_groups(archive, groups, WORK / "streams" / archive.name)
    mib = archive.stat().st_size / 2**20
    counts = f"{len(new)} of {len(groups)} groups compressed"
    print(f"gpu-rehearsal: {archive.relative_to(ROOT)}, {mib:.1f} MiB, {counts}, {what}")


def vllm() -> None:
    architecture = int(ARCHITECTURE.rstrip("af"))
    site = gpu_vllm.make(PYTHON, WORK, [TREE, SITE], architecture)
    write_archive(VLLM, {"site": [(site, "site")]}, f"vLLM {gpu_vllm.VERSION}")


def peers() -> None:
    architecture = int(ARCHITECTURE.rstrip("af"))
    archive = PACK.with_name("gpu-peers.tar.xz")
    gpu_peers.write(PYTHON, WORK, [TREE, SITE], archive, architecture)


def ready() -> None:
    """Say whether the archives are of these sources, and fit with them on a GPU machine."""
    carried = [file for file in (PACK, VLLM) if file.is_file()]
    faults = [f"{file.name} is not there" for file in {PACK, VLLM}.difference(carried)]
    if PACK.is_file():
        with tarfile.open(PACK) as file:
            first = file.extractfile(next(iter(file)))  # its description
            packed = json.loads(first.read() if first else b"{}")
        now = {"sources": gpu_build.hash_of_sources(), "kernels": gpu_build.hash_of_kernels()}
        what = {"sources": "extension", "kernels": "Triton kernels"}
        old = [what[key] for key in now if packed.get(key) != now[key]]
        if old:
            found = f"{' and '.join(old)} of the pack, made at {packed['commit']},"
            faults.append(f"{found} are not all of these sources")
    mib = sum(file.stat().st_size for file in [*carried, *(ROOT / n for n in tracked())]) / 2**20
    if mib > CARRIED_MIB:
        faults.append(f"archives and sources have {mib:.0f} MiB, more than {CARRIED_MIB}")
    print(f"gpu-rehearsal: archives and sources: {mib:.1f} MiB")
    if faults:
        sys.exit(f"gpu-rehearsal: not ready: {'; '.join(faults)}. `make gpu-pack` makes the pack.")


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def kernels() -> None:
    call(PYTHON, "tools/cuda_check.py", "--arch", ARCHITECTURE, PYTHONPATH=TREE)


def imports() -> None:
    call(PYTHON, "tools/import_all.py", PYTHONPATH=TREE)
    call(PYTHON, "tools/import_all.py", "--all", PYTHONPATH=f"{TREE}{os.pathsep}{SITE}")


def collect() -> None:
    folders = ("tests/kernels", "tests/model", "tests/sync")
    call(PYTHON, *("-m", "pytest", "-q", "--collect-only", "-qm", "gpu"), *folders, PYTHONPATH=TREE)


def report() -> None:
    call(PYTHON, "tools/gpu_report.py", *("--device", "cpu", "--pack", PACK))


def calls() -> None:
    """Run both calls on the CPU, from the archives that are there."""
    errors = []
    for name in ("1.sh", "2.sh"):
        script = TREE / "tools" / "gpu_calls" / name
        folder = {"BUILD": PACK.parent, "OUT": PACK.with_name("gpu-out")}
        try:
            call("bash", script, "--device", "cpu", PYTHON=PYTHON, **folder)
        except subprocess.CalledProcessError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def pip(*arguments: object) -> None:
    call(PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=ROOT)


def call(*command: object, cwd: Path = TREE, **environment: object) -> None:
    """Run a command; raise CalledProcessError if it fails."""
    words = [str(word) for word in command]
    extra = {key: str(value) for key, value in environment.items()}
    subprocess.run(words, cwd=cwd, env=os.environ | extra, check=True)


STEPS = {
    step.__name__: step
    for step in (
        *(environment, build, triton, pack, vllm, peers),
        *(kernels, imports, collect, report, calls, ready),
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", nargs="*", choices=[[], *STEPS], help=", ".join(STEPS))
    chosen = parser.parse_args().step or STEPS.keys() - {"vllm", "peers", "calls", "ready"}
    WORK.mkdir(parents=True, exist_ok=True)
    copy_sources()
    failed = []
    for name in STEPS:
        if name not in chosen:
            continue
        print(f"gpu-rehearsal: {name}", flush=True)
        started = time.monotonic()
        try:
            STEPS[name]()
        except subprocess.CalledProcessError as error:
            print(f"gpu-rehearsal: {name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            if name in ("environment", "build", "pack"):
                break
        print(f"gpu-rehearsal: {name}: {time.monotonic() - started:.0f} s", flush=True)
    print(f"gpu-rehearsal: {'failed: ' + ', '.join(failed) if failed else 'passed'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
