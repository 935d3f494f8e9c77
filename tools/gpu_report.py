"""Build, test and measure this project on a GPU machine, into benchmarks/results/<device>.json.

    python tools/gpu_report.py [--resume] [--pack FOLDER] [--results FILE] [PART ...]

    build     the extension, for this GPU only
    kernels   every operator against its baselines, the most important ones first
    vllm      syncs into a real vLLM engine, through sleep, compared with the trainer
    tests     the GPU tests of kernels, model and sync
    profile   the kernels that have goals under Nsight Compute
    step      GRPO steps of a random model of 0.5B parameters, by phase
    reshard   weight syncs between ranks
    sanitize  the GPU tests of the kernels under compute-sanitizer

Uses the python3 that runs it, and no network. Every part has a section in the results file, which
is written after each row, and a time limit; a part that fails or runs out of time keeps its rows,
and the parts after it run. `--resume` keeps the rows of the same commit. `--pack`: a folder of
`make gpu-pack`, with the built extension and wheels; `--vllm` and `--peers`: archives with vLLM
and with baselines in CuTe-DSL. `--device cpu` rehearses all parts on small shapes. Exits with 1 if
a part did not pass.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "gpu"
LIMIT_S = 530  # of a part
GPU_LOST = 3  # exit status of benchmarks: a baseline broke the context of its process
LIMITS_S = {"vllm": 400, "profile": 240, "step": 400, "reshard": 240}
# The most important first: what a time limit cuts off is at the end.
KERNELS = (
    *("logprob", "linear", "strided_copy", "packing", "policy_loss", "advantage", "attention"),
    *("shared_prefix", "sparse_linear", "head_share", "linear_cross_entropy", "distillation"),
    *("block_quantize", "decode_linear", "exact_operators", "sampling", "grouped_linear"),
    "delta_ops",
)
PARTS = {
    "build": ("tools/gpu_build.py",),
    "kernels": ("-m", "benchmarks", *KERNELS),
    "vllm": ("-m", "benchmarks", "engine"),
    "tests": ("tools/gpu_tests.py",),
    "profile": ("tools/gpu_profile.py",),
    "step": ("-m", "benchmarks", "step"),
    "reshard": ("-m", "benchmarks", "sync"),
    "sanitize": ("tools/gpu_sanitize.py",),
}


class Results:
    """The results file: facts about machine and software, and a section for each part."""

    def __init__(self, file: Path, facts: dict[str, Any]) -> None:
        self.file = file
        known = json.loads(file.read_text()) if file.is_file() else {}
        self.document = {**facts, "parts": known.get("parts", {})}

    def section(self, part: str) -> dict[str, Any]:
        return self.document["parts"].get(part, {})

    def write(self, part: str, section: dict[str, Any]) -> None:
        parts = self.document["parts"] | {part: section}
        self.document["parts"] = {name: parts[name] for name in PARTS if name in parts}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.document, indent=1) + "\n")
        temporary.replace(self.file)


def run_part(
    part: str,
    command: Sequence[str],
    results: Results,
    *,
    resume: bool,
    environment: dict[str, str],
    limit_s: float,
) -> str:
    """Run the command of a part, which writes `--json FILE` after every row; return its status.

    The rows are copied into the results while it runs. A command that is still running after
    `limit_s` seconds is ended with all its processes. One that a signal ended, or that lost the
    GPU, goes on in a new process, as long as each adds to the rows.
    """
    sources = {"sources_commit": results.document["commit"]}
    rows = WORK / f"{part}.json"
    rows.unlink(missing_ok=True)
    earlier = results.section(part)
    resume = resume and earlier.get("sources_commit") == sources["sources_commit"]
    if resume:
        own = {"status", "seconds", *sources}
        rows.write_text(json.dumps({k: v for k, v in earlier.items() if k not in own}))
    started = time.monotonic()
    written: dict[str, Any] = {"rows": []}
    command = [*command, "--json", str(rows)]
    while True:
        full = [*command, *(["--resume"] if resume else [])]
        print(f"$ {' '.join(full)}", flush=True)
        process = subprocess.Popen(full, cwd=ROOT, env=environment, process_group=0)
        before = written
        try:
            status = "running"
            while status == "running":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                code, seconds = process.returncode, time.monotonic() - started
                if code is not None:
                    status = "passed" if code == 0 else f"exit code {code}"
                elif seconds > limit_s:
                    status = f"not finished after {limit_s:g} s"
                with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                    written = json.loads(rows.read_text())
                section = {"status": status, "seconds": round(seconds), **sources, **written}
                results.write(part, section)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not (code is not None and (code < 0 or code == GPU_LOST) and written != before):
            return status
        resume = True


def facts(device: str) -> dict[str, Any]:
    """What a result depends on: device, driver, versions, commit, date."""
    import torch

    on_gpu = device == "cuda"
    triton = installed("triton")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "num_devices": torch.cuda.device_count() if on_gpu else 0,
        "driver": output_of(query) if on_gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton,
        "python": sys.version.split()[0],
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def installed(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def output_of(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def commit() -> str | None:
    """The commit of the sources; a copy without its history has it from the pack."""
    given = os.environ.get("HYBRIDENGINE_COMMIT")
    return given or output_of(["git", "describe", "--always", "--dirty", "--exclude=*"])


def unpack(archive: Path, folder: Path) -> None:
    """Make `folder` of an archive, or of its parts ARCHIVE.0 and on, if it is not there."""
    if folder.is_dir():
        return
    parts = sorted(archive.parent.glob(f"{archive.name}.[0-9]")) or [archive]
    data = io.BytesIO(b"".join(part.read_bytes() for part in parts))
    with tarfile.open(fileobj=data) as file:
        file.extractall(folder, filter="data")


def prepare(pack: Path | None, vllm: Path | None, peers: Path | None) -> dict[str, str]:
    """Install the wheels of the pack, vLLM and the baselines in folders of their own.

    Returns the environment.
    """
    WORK.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT)]
    environment = dict(os.environ)
    if pack is not None:
        site = WORK / "site"
        if not site.is_dir():
            install = (*("-m", "pip", "install", "-q", "--no-index", "--no-deps"), "--target")
            wheels = map(str, sorted((pack / "wheels").glob("*.whl")))
            subprocess.run([sys.executable, *install, str(site), *wheels], check=True)
        paths.append(str(site))
        described = json.loads((pack / "pack.json").read_text())
        environment["HYBRIDENGINE_PACK"] = str(pack.resolve())
        environment.setdefault("HYBRIDENGINE_COMMIT", described["commit"] or "")
    if vllm is not None:
        folder = WORK / "vllm"
        unpack(vllm, folder)
        paths.append(str(folder / "site"))
        environment |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
    if peers is not None:
        folder = WORK / "peers"
        unpack(peers, folder)
        described = json.loads((folder / "environment.json").read_text())
        paths += [str(folder / path) for path in described["paths"]]
        environment |= {name: str(folder / path) for name, path in described["folders"].items()}
        environment |= described["values"]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return environment | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def main() -> int:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    parser.add_argument("part", nargs="*", choices=[[], *PARTS], help=", ".join(PARTS))
    parser.add_argument("--resume", action="store_true", help="keep the rows of this commit")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="made by `make gpu-pack`")
    parser.add_argument("--vllm", type=Path, metavar="FILE", help="made by tools/gpu_vllm.py")
    parser.add_argument("--peers", type=Path, metavar="FILE", help="made by tools/gpu_peers.py")
    parser.add_argument("--results", type=Path, metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.pack and not (arguments.pack / "pack.json").is_file():
        parser.error(f"--pack: {arguments.pack} has no pack.json; `make gpu-pack` makes it")
    environment = prepare(arguments.pack, arguments.vllm, arguments.peers)
    os.environ["HYBRIDENGINE_COMMIT"] = environment.get("HYBRIDENGINE_COMMIT", "")
    import torch

    sys.path.insert(0, str(ROOT))
    from tools.package_links import linked_in_place

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu-report: torch finds no CUDA device.", file=sys.stderr)
        return 1
    found = facts(arguments.device)
    name = re.sub(r"\W+", "-", found["device"]).strip("-").lower()
    folder = ROOT / "benchmarks" / "results" if arguments.device == "cuda" else WORK
    results = Results(arguments.results or folder / f"{name}.json", found)
    extra = ["--device", arguments.device, *(["--quick"] if arguments.device == "cpu" else [])]
    statuses = {}
    with linked_in_place():
        for part in arguments.part or PARTS:
            command = [sys.executable, *PARTS[part], *extra]
            statuses[part] = run_part(
                part,
                command,
                results,
                resume=arguments.resume,
                environment=environment,
                limit_s=LIMITS_S.get(part, LIMIT_S) * (1 if arguments.device == "cuda" else 10),
            )
    for part, status in statuses.items():
        print(f"gpu-report: {part}: {status}")
    print(f"gpu-report: {results.file}")
    return int(any(status != "passed" for status in statuses.values()))


if __name__ == "__main__":
    sys.exit(main())
