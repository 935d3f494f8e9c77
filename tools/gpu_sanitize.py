"""Run the GPU tests of the kernels under compute-sanitizer; the part `sanitize` of gpu_report.py.

    python tools/gpu_sanitize.py --json FILE [--resume] [--device cpu]

memcheck (accesses out of bounds, misaligned, of freed memory) over one call of every operator
(tools.gpu_probe), then over every file of tests/kernels with GPU tests, then racecheck (hazards in
shared memory). A row has tool, test (the file), outcome (passed, failed, not finished, skipped),
seconds, and the first errors. Where compute-sanitizer is not installed, one row says so. Files run
beside each other: most of their time is Triton's compiler and the tool's, on a core each.
`--resume` runs what has not passed. `--device cpu` collects the tests only, without the tool.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
LIMIT_S = 120  # of a file under a tool
WORKERS = max(1, min(12, (os.cpu_count() or 1) * 3 // 4))
PROBE = "tools.gpu_probe"
ERRORS = 99  # exit code of compute-sanitizer where it found some
NO_TESTS = 5  # exit code of pytest
MESSAGE_CHARACTERS = 2000


def test_files() -> list[str]:
    """The files with GPU tests, from the repository's root; marks may come from other modules."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qm", "gpu", "tests/kernels"]
    command.append("--continue-on-collection-errors")  # a file that fails has a row of `tests`
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return sorted({line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line})


def command_of(tool: str, file: str, sanitizer: str | None) -> list[str]:
    """sanitizer: path of compute-sanitizer; None: collect the tests only."""
    device = "cpu" if sanitizer is None else "cuda"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", file]
    if file == PROBE:
        command = [
            sys.executable,
            "-m",
            PROBE,
            "--operators",
            "--device",
            device,
            "--json",
            os.devnull,
        ]
    elif sanitizer is None:
        command.append("--collect-only")
    options = (f"--tool={tool}", f"--error-exitcode={ERRORS}", "--target-processes=all")
    return command if sanitizer is None else [sanitizer, *options, *command]


def outcome_of(code: int | None, output: str) -> dict[str, str]:
    """Return outcome and message. code: None where the command did not finish."""
    if code in (0, NO_TESTS):
        return {"outcome": "passed"}
    # What the sanitizer found; a test that fails without it has its message in the part `tests`.
    lines = [line for line in output.splitlines() if line.startswith("=========")] or [output]
    message = "\n".join(lines)[:MESSAGE_CHARACTERS]
    return {"outcome": "failed" if code is not None else "not finished", "message": message}


def run(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run a command, at most `limit_s` seconds; return its exit code (None: ended) and output."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="changes nothing here")
    parser.add_argument("--resume", action="store_true", help="run what has not passed")
    arguments = parser.parse_args()
    on_cpu, sanitizer = arguments.device == "cpu", shutil.which("compute-sanitizer")
    earlier = json.loads(arguments.json.read_text())["rows"] if arguments.resume else []
    rows: list[dict[str, Any]] = [row for row in earlier if row["outcome"] == "passed"]

    def add(tool: str, file: str, **values: Any) -> None:
        rows.append({"tool": tool, "test": file, **values})
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")

    if sanitizer is None and not on_cpu:
        add("compute-sanitizer", "", outcome="skipped", message="it is not installed")
        return 0
    known = {(row["tool"], row["test"]) for row in rows}
    tools = TOOLS[:1] if on_cpu else TOOLS
    left = [pair for pair in product(tools, [PROBE, *test_files()]) if pair not in known]

    def check(tool: str, file: str) -> None:
        started = time.monotonic()
        code, output = run(command_of(tool, file, None if on_cpu else sanitizer), LIMIT_S)
        seconds = round(time.monotonic() - started)
        with writing:
            add(tool, file, **outcome_of(code, output), seconds=seconds)
            print(f"# {tool} {file}: {rows[-1]['outcome']}", flush=True)

    writing = Lock()
    with ThreadPoolExecutor(1 if on_cpu else WORKERS) as pool:
        list(pool.map(lambda pair: check(*pair), left))
    return int(any(row["outcome"] != "passed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
