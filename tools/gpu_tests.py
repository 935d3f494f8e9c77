"""Run the GPU tests, one row per test; the part `tests` of gpu_report.py, and a pytest plugin.

    python tools/gpu_tests.py --json FILE [--resume] [--device cpu] [TEST ...]

A row has test, outcome (passed, failed, skipped, or what ended pytest), seconds, and a message if
it failed; a file that cannot be imported has one too. An error that the GPU does not recover from,
a crash and a test above its time limit end pytest, which starts again with the tests that are left;
the message is then the end of its output.
`--resume` runs what has not passed.

`--device cpu`, without a GPU: the GPU tests up to their first call of the device (outcome
`skipped`), and the tests of what depends on the versions of torch, Triton and transformers: the
operators and their CPU twins, Triton's interpreter, models, FSDP2 and DTensor, the trainer with the
Hugging Face engine. Tests of our own arithmetic (SAME_CODE) take the same path under every version.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests/kernels", "tests/model", "tests/sync")
DEVICES = ("cuda", "cpu")
LIMITS_S = {"cuda": 120, "cpu": 300}  # of a test
MESSAGE_CHARS = 6000  # the traceback of a rank follows that of the test
# Processes on a GPU. Triton's compiler takes most of the time, on a core each.
WORKERS = max(1, min(12, (os.cpu_count() or 1) * 3 // 4))
# Without a GPU also these, which start ranks.
RANKS = (
    *("tests/train/checkpoint/test_checkpointer.py", "tests/model/test_sharded.py"),
    *("tests/model/test_fsdp_options.py", "tests/sync/test_exchange.py"),
    *("tests/extras/hf/test_hf.py", "tests/train/test_loss_forms.py", "tests/train/test_sft.py"),
)
# Tests of C++ and Python that call nothing of torch but tensors, and more inputs of operators that
# other tests run. `make test` has them.
SAME_CODE = (
    *("*_hostile.py", "*_cuda_on_cpu.py", "test_against_*.py"),
    *("test_balance.py", "test_buckets.py", "test_coverage.py", "test_forest.py"),
    *("test_group_slots.py", "test_instruction_sets.py", "test_large_models.py"),
    *("test_layers.py", "test_plan.py", "test_policy_loss_terms.py", "test_regions.py"),
    *("test_reordering.py", "test_rollout_metrics.py"),
)
# What never passed on a GPU: these tests are run first.
FIRST = ("*/sampling/*", "*/attention/*", "*exact*", "*grouped_linear*")
FATAL = ("CUDA error", "CUDNN_STATUS", "CUBLAS_STATUS", "device-side assert")  # for later tests too
NO_DEVICE = (
    *("Found no NVIDIA driver", "0 active drivers", "No CUDA GPUs are available"),
    "CUDA driver version is insufficient",
)


class Rows:
    """The rows of the JSON file: test id → row."""

    def __init__(self, file: Path) -> None:
        self.file = file
        rows = json.loads(file.read_text())["rows"] if file.is_file() else []
        self.by_test: dict[str, dict[str, Any]] = {row["test"]: row for row in rows}

    def add(self, test: str, **values: Any) -> None:
        self.by_test[test] = {"test": test, **values}
        self.write()

    def write(self) -> None:
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"rows": list(self.by_test.values())}, indent=1) + "\n")
        temporary.replace(self.file)


class Recorder:
    """Leave out the tests that have a row, and write one for every other as soon as it ends."""

    def __init__(self, rows: Rows, device: str) -> None:
        self.rows, self.device = rows, device

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        kept, left_out = list[Any](), list[Any]()
        for item in items:
            wanted = item.nodeid not in self.rows.by_test and is_selected(item, self.device)
            (kept if wanted else left_out).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            message = str(report.longrepr)[-MESSAGE_CHARS:]
            self.rows.add(report.nodeid, outcome="failed", seconds=0.0, message=message)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.rows.add(nodeid, outcome="started", seconds=0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        text = str(call.excinfo.value) if report.failed else ""
        if self.device == "cpu" and any(words in text for words in NO_DEVICE):
            report.outcome, report.longrepr = "skipped", (item.nodeid, None, "needs the device")
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        row = self.rows.by_test[report.nodeid]
        row["seconds"] = round(row["seconds"] + report.duration, 3)
        if report.outcome != "passed":
            row["outcome"] = report.outcome
            row["message"] = str(report.longrepr)[-MESSAGE_CHARS:]
        elif report.when == "call" and row["outcome"] == "started":
            row["outcome"] = "passed"
        self.rows.write()
        if report.failed and any(words in row["message"] for words in FATAL):
            pytest.exit(f"{report.nodeid}: the GPU needs a new process", returncode=3)


class Collector(Recorder):
    """List the tests that have no row, as arguments of pytest; a file that fails gets its row."""

    def __init__(self, rows: Rows, device: str) -> None:
        super().__init__(rows, device)
        self.tests: list[str] = []

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            self.tests.append(f"{item.path}::{item.nodeid.partition('::')[2]}")


def is_selected(item: Any, device: str) -> bool:
    """Return whether a collected test is one of the report, or of its rehearsal on a CPU."""
    if device == "cuda" or item.get_closest_marker("gpu"):
        return bool(item.get_closest_marker("gpu"))
    if any(item.path.match(pattern) for pattern in SAME_CODE) or item.get_closest_marker("slow"):
        return False
    return not item.get_closest_marker("multirank") or any(item.path.match(p) for p in RANKS)


def run_pytest(file: Path, device: str, tests: list[str]) -> int:
    """Run the tests that have no row in `file`; return pytest's exit code."""
    arguments = [*pytest_options(device), f"--timeout={LIMITS_S[device]}"]
    arguments += ["-q", "--timeout-method=thread", *tests]
    return int(pytest.main(arguments, plugins=[Recorder(Rows(file), device)]))


def pytest_options(device: str) -> list[str]:
    marks = "gpu" if device == "cuda" else "gpu or not slow"
    return ["-p", "no:cacheprovider", "--continue-on-collection-errors", "-m", marks]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("test", nargs="*", metavar="TEST")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--quick", action="store_true", help="changes nothing here")
    parser.add_argument("--resume", action="store_true", help="run what has not passed")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    tests = arguments.test or [*FOLDERS, *(RANKS if on_cpu else ())]
    if arguments.once:
        return run_pytest(arguments.json, arguments.device, tests)
    if on_cpu:
        print("gpu-tests: without a GPU; run by `make test` only:", ", ".join(SAME_CODE))
    if not arguments.resume:
        arguments.json.unlink(missing_ok=True)
    rows = Rows(arguments.json)
    rows.by_test = {t: row for t, row in rows.by_test.items() if row["outcome"] == "passed"}
    rows.write()
    return run_all(arguments.json, arguments.device, tests, 1 if on_cpu else WORKERS)


def comes_later(test: str) -> bool:
    return not any(Path(test.partition("::")[0]).match(pattern) for pattern in FIRST)


def run_all(file: Path, device: str, tests: list[str], workers: int) -> int:
    """Run the tests in so many processes, each with its share of them; return the exit code.

    The rows of all are in `file` from second to second.
    """
    shares = [tests]
    if workers > 1:
        collector = Collector(Rows(file), device)
        pytest.main([*pytest_options(device), "--collect-only", "-qq", *tests], plugins=[collector])
        collector.tests.sort(key=comes_later)
        shares = [collector.tests[worker::workers] for worker in range(workers)]
    files = [file.with_suffix(f".{worker}.json") for worker in range(workers)]
    for part in files:
        part.write_text(file.read_text())  # what has a row is not run again
    rows = Rows(file)
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(run_share, *s) for s in zip(files, repeat(device), shares)}
        while True:
            done, _ = wait(running, timeout=1.0)
            for part in files:
                rows.by_test |= Rows(part).by_test
            rows.write()
            if done == running:
                break
    for part in files:
        part.unlink()
    bad = [r["test"] for r in rows.by_test.values() if r["outcome"] not in ("passed", "skipped")]
    print(f"gpu-tests: {len(rows.by_test)} tests, {len(bad)} failed", *bad, sep="\n  ")
    return int(bool(bad) or not all(task.result() for task in running))


def run_share(file: Path, device: str, tests: list[str]) -> bool:
    """Start pytest until no test is left, or it ends without a new row; return whether none is."""
    command = [sys.executable, str(Path(__file__)), "--json", str(file), "--device", device]
    while tests:
        before = len(Rows(file).by_test)
        done = subprocess.run(
            [*command, "--once", *tests],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(done.stdout, end="", flush=True)
        code, rows = done.returncode, Rows(file)
        ended = [row for row in rows.by_test.values() if row["outcome"] == "started"]
        for row in ended:
            row["outcome"] = f"ended pytest with exit code {code}"
            row["message"] = done.stdout[-MESSAGE_CHARS:]
        rows.write()
        # A test above its limit ends pytest with the code of failed tests, too.
        if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not ended:
            break
        if len(rows.by_test) == before:
            return code == pytest.ExitCode.NO_TESTS_COLLECTED
    return True


if __name__ == "__main__":
    sys.exit(main())
