"""Build, test and measure this project on a GPU machine; the results are one JSON file.

    python tools/gpu_report.py [--limit-s S] [--results FILE] [--pack FILE] [PART[=S][+] ...]

    build        the extension, for this GPU only
    kernels      every operator against its baselines, the most important ones first
    vllm         syncs into a real vLLM engine, through sleep, compared with the trainer
    tests        the GPU tests of kernels, model and sync
    profile      the kernels that have goals under Nsight Compute
    step         GRPO steps of a random model of 0.5B parameters, by phase
    reshard      weight syncs between ranks
    sanitize     the operators and the GPU tests of the kernels under compute-sanitizer
    probe        launches, every operator against float64, the peaks; not by default
    vllm_start   vLLM alone, from its simplest form up; not by default
    micro_batch  a training micro-batch of 0.5B parameters, in several forms; not by default
    rows         operators whose rows are missing or old, few baselines; not by default

Uses the python3 that runs it, and no network. PART=S limits a part to S seconds; with a `+` it runs
beside the parts after it. `--limit-s` is the limit of all together. Every part has a section in the
results file, which is written after each row; a part that fails or runs out of time is ended with
all its processes and keeps its rows, and the parts after it run. `--resume` keeps the rows of the
same commit. `--pack`: an archive of `make gpu-pack`, with the built extension, packages and
compiled Triton kernels; `--vllm` and `--peers`: archives with vLLM and with baselines. `--device
cpu` rehearses all parts on small shapes. Exits with 1 if a part did not pass.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.gpu_build import gpu_facts
from tools.package_links import linked_in_place, write_entry_points
from tools.triton_cache import relocate

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "gpu"
LIMIT_S = 530  # of a part
LEAST_S = 2  # with less left a part is not started
GPU_LOST = 3  # exit status of benchmarks: a baseline broke the context of its process
LIMITS_S = {"vllm": 400, "profile": 240, "step": 400, "reshard": 240}
# The most important first: what a time limit cuts off is at the end.
KERNELS = (
    *("logprob", "linear", "strided_copy", "packing", "policy_loss", "advantage", "attention"),
    *("shared_prefix", "sparse_linear", "head_share", "linear_cross_entropy", "distillation"),
    *("block_quantize", "decode_linear", "exact_operators", "sampling", "grouped_linear"),
    "delta_ops",
)
# The first three are short, and what has a prediction but no figure.
ROWS = (
    *("strided_copy", "block_quantize", "decode_linear", "attention", "linear", "sampling"),
    *("linear_recurrence", "orthogonalize"),
)
ROW_IMPLS = "hybridengine|varlen|fa3|gemm|torch|vllm"
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
# Of the two short calls, tools/gpu_calls.
MORE_PARTS = {
    "probe": ("-m", "tools.gpu_probe"),
    "vllm_start": ("-m", "benchmarks", "vllm_start"),
    "micro_batch": ("-m", "benchmarks", "micro_batch"),
    "rows": ("-m", "benchmarks", *ROWS, "--op-limit-s", "15", "--impl", ROW_IMPLS),
}
ALL_PARTS = PARTS | MORE_PARTS
WITH_VLLM = {"kernels", "vllm", "vllm_start", "rows", "step"}


class Part(NamedTuple):
    name: str
    limit_s: float
    beside: bool  # it runs beside the parts after it

    @classmethod
    def of(cls, text: str) -> Part:
        """Read PART[=S][+]."""
        match = re.fullmatch(r"(\w+)(?:=(\d+))?(\+?)", text)
        if match is None or match[1] not in ALL_PARTS:
            names = ", ".join(ALL_PARTS)
            raise argparse.ArgumentTypeError(f"{text!r}: expected PART[=S][+] of {names}")
        limit_s = float(match[2] or LIMITS_S.get(match[1], LIMIT_S))
        return cls(match[1], limit_s, bool(match[3]))


class Results:
    """The results file: facts about machine and software, and a section for each part."""

    def __init__(self, file: Path, facts: dict[str, Any]) -> None:
        self.file = file
        self._lock = Lock()
        known = json.loads(file.read_text()) if file.is_file() else {}
        self.document = {**facts, "parts": known.get("parts", {})}

    def section(self, part: str) -> dict[str, Any]:
        return self.document["parts"].get(part, {})

    def write(self, part: str, section: dict[str, Any]) -> None:
        with self._lock:
            parts = self.document["parts"] | {part: section}
            self.document["parts"] = {name: parts[name] for name in ALL_PARTS if name in parts}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary = WORK / f"{self.file.name}.tmp"
            temporary.write_text(json.dumps(self.document, indent=1) + "\n")
            shutil.move(temporary, self.file)


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
    GPU, goes on in a new process, as long as each adds to the rows. Its output gets the part's
    name; files <part>.<name> that it writes beside its rows are moved to those of the results.
    """
    sources = {"sources_commit": results.document["commit"]}
    WORK.mkdir(parents=True, exist_ok=True)
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
        print(f"{part}: $ {' '.join(full)}", flush=True)
        process = subprocess.Popen(
            full,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        printing = Thread(target=_print_output, args=(part, process), daemon=True)
        printing.start()
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
                section = {"status": status, "seconds": round(seconds, 1), **sources, **written}
                results.write(part, section)
        finally:
            end_processes(process.pid)
            process.wait()
            printing.join(5.0)
            for file in WORK.glob(f"{part}.*.gz"):
                shutil.move(file, results.file.with_name(file.name))
        lost = code is not None and (code < 0 or code == GPU_LOST)
        if not (lost and written != before and seconds < limit_s):
            return status
        resume = True


def _print_output(part: str, process: subprocess.Popen[str]) -> None:
    for line in process.stdout or ():
        print(f"{part}: {line}", end="", flush=True)


def end_processes(first: int) -> None:
    """Kill what is left of the group of the process `first`, and every child of those."""
    while True:
        parents, groups = dict[int, int](), dict[int, int]()
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = file.read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":  # it has ended
                    parents[int(file.parent.name)] = int(fields[1])
                    groups[int(file.parent.name)] = int(fields[2])
        found = {pid for pid in parents if groups[pid] == first}
        while more := {pid for pid in parents if parents[pid] in found} - found:
            found |= more
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def facts(device: str) -> dict[str, Any]:
    """What a result depends on: device, driver, versions, commit, date. torch is not imported."""
    gpus = gpu_facts() if device == "cuda" else []
    spec = importlib.util.find_spec("torch")
    text = (Path(spec.origin or "").parent / "version.py").read_text() if spec else ""
    versions = dict(re.findall(r"^(__version__|cuda)\b.*= '(.*)'", text, re.MULTILINE))
    return {
        "device": gpus[0]["name"] if gpus else "cpu",
        "num_devices": len(gpus),
        "driver": gpus[0]["driver_version"] if gpus else None,
        "cuda": versions.get("cuda"),
        "torch": versions.get("__version__"),
        "triton": installed("triton"),
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


def unpack(archive: Path, folder: Path) -> Path:
    """Make `folder` of an archive, or of its parts ARCHIVE.0 and on, if it is not of this one.

    An archive that is not there is what an earlier call unpacked.
    """
    parts = sorted(archive.parent.glob(f"{archive.name}.[0-9]")) or [archive]
    if not parts[0].is_file() and folder.is_dir():
        return folder
    data = b"".join(part.read_bytes() for part in parts)
    stamp, key = "archive.sha256", hashlib.sha256(data).hexdigest()
    if (folder / stamp).is_file() and (folder / stamp).read_text() == key:
        return folder
    unfinished = folder.with_suffix(".part")
    for old in (unfinished, folder):
        shutil.rmtree(old, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        file.extractall(unfinished, filter="data")
    (unfinished / stamp).write_text(key)
    unfinished.replace(folder)
    return folder


class Environment:
    """The environment of the parts: packages of the archives, each in a folder of its own.

    The one with vLLM is unpacked while parts run that do without. No part on a CPU gets it: vLLM's
    wheel is for GPUs only.
    """

    def __init__(
        self, pack: Path | None, vllm: Path | None, peers: Path | None, on_gpu: bool = True
    ) -> None:
        WORK.mkdir(parents=True, exist_ok=True)
        self._on_gpu = on_gpu
        self._pool = ThreadPoolExecutor(1)
        self._vllm: Future[Path] | None = None
        if vllm is not None:
            self._vllm = self._pool.submit(unpack, vllm, WORK / "vllm")
        self._paths = [str(ROOT), str(write_entry_points(WORK / "metadata"))]
        self._variables = dict(os.environ)
        if pack is not None:
            try:
                self._add_pack(unpack(pack, WORK / "pack"))
            except Exception as error:  # the extension is compiled, parts run with what is there
                print(f"gpu-report: {pack} is left out: {error!r}", file=sys.stderr, flush=True)
        if peers is not None:
            folder = unpack(peers, WORK / "peers")
            described = json.loads((folder / "environment.json").read_text())
            self._paths += [str(folder / path) for path in described["paths"]]
            folders = {name: str(folder / path) for name, path in described["folders"].items()}
            self._variables |= folders | described["values"]

    def _add_pack(self, folder: Path) -> None:
        self._paths.append(str(folder / "site"))
        described = json.loads((folder / "pack.json").read_text())
        self._variables["HYBRIDENGINE_PACK"] = str(folder)
        self._variables.setdefault("HYBRIDENGINE_COMMIT", described["commit"] or "")
        if (folder / "triton").is_dir():
            relocate(folder / "triton")
            self._variables["TRITON_CACHE_DIR"] = str(folder / "triton")

    @property
    def commit(self) -> str:
        return self._variables.get("HYBRIDENGINE_COMMIT", "")

    def of(self, part: str) -> dict[str, str]:
        """Return the variables for a part. Waits for vLLM if it needs that."""
        paths, variables = [*self._paths], self._variables
        if self._vllm is not None and part in WITH_VLLM:
            try:
                folder = self._vllm.result()
                paths += [str(folder / "site")] if self._on_gpu else []
            except Exception as error:  # most of these parts do less without it
                print(f"gpu-report: {part} runs without vLLM: {error!r}", file=sys.stderr)
            variables = variables | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
        if os.environ.get("PYTHONPATH"):
            paths.append(os.environ["PYTHONPATH"])
        return variables | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def run_parts(
    parts: Sequence[Part],
    results: Results,
    environment: Environment,
    extra: Sequence[str],
    *,
    limit_s: float,
    resume: bool,
) -> dict[str, str]:
    """Run parts one after the other, those `beside` beside others; return the status of each."""
    end = time.monotonic() + limit_s
    statuses: dict[str, str] = {}

    def run(part: Part) -> None:
        try:
            variables = environment.of(part.name)
            left = end - time.monotonic()
            if left < LEAST_S:
                statuses[part.name] = "not started: no time was left"
                results.write(part.name, {"status": statuses[part.name], "rows": []})
                return
            statuses[part.name] = run_part(
                part.name,
                [sys.executable, *ALL_PARTS[part.name], *extra],
                results,
                resume=resume,
                environment=variables,
                limit_s=round(min(part.limit_s, left), 1),
            )
        except Exception as error:  # as an archive that is broken: the parts after it still run
            statuses[part.name] = f"{type(error).__name__}: {error}"
            results.write(part.name, {"status": statuses[part.name], "rows": []})

    statuses = {part.name: "not started" for part in parts}
    with ThreadPoolExecutor(len(parts)) as pool:
        for part in parts:
            done = pool.submit(run, part)
            if not part.beside:
                done.result()
    return statuses


def main() -> int:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    parser.add_argument("part", nargs="*", type=Part.of, metavar="PART[=S][+]")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="of all parts")
    parser.add_argument("--resume", action="store_true", help="keep the rows of this commit")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="made by `make gpu-pack`")
    parser.add_argument("--vllm", type=Path, metavar="FILE", help="made by tools/gpu_vllm.py")
    parser.add_argument("--peers", type=Path, metavar="FILE", help="made by tools/gpu_peers.py")
    parser.add_argument("--results", type=Path, metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    started, on_cpu = time.monotonic(), arguments.device == "cpu"
    found = facts(arguments.device)
    if not on_cpu and not found["num_devices"]:
        print("gpu-report: nvidia-smi finds no GPU.", file=sys.stderr)
        return 1
    environment = Environment(arguments.pack, arguments.vllm, arguments.peers, not on_cpu)
    found["commit"] = environment.commit or found["commit"]
    name = re.sub(r"\W+", "-", found["device"]).strip("-").lower()
    folder = WORK if on_cpu else ROOT / "benchmarks" / "results"
    results = Results(arguments.results or folder / f"{name}.json", found)
    parts = arguments.part or [Part.of(name) for name in PARTS]
    slower = 10 if on_cpu else 1
    with linked_in_place():
        statuses = run_parts(
            [part._replace(limit_s=part.limit_s * slower) for part in parts],
            results,
            environment,
            ["--device", arguments.device, *(["--quick"] if on_cpu else [])],
            limit_s=arguments.limit_s * slower - (time.monotonic() - started),
            resume=arguments.resume,
        )
    for part, status in statuses.items():
        section = results.section(part)
        count = f"{len(section.get('rows', []))} rows in {section.get('seconds', 0)} s"
        print(f"gpu-report: {part}: {status}, {count}")
    print(f"gpu-report: {results.file}, {time.monotonic() - started:.0f} s")
    return int(any(status != "passed" for status in statuses.values()))


if __name__ == "__main__":
    sys.exit(main())
