"""Run the GPU tests, one row per test; the part `tests` of gpu_report.py, and a pytest plugin.

    python tools/gpu_tests.py --json FILE [--resume] [--device cpu] [TEST ...]

A row has test, outcome (passed, failed, skipped, or what ended pytest), seconds, and a message if
it failed; a file that cannot be imported has one too. An error that the GPU does not recover from,
a crash and a test above its time limit end pytest, which starts again with the tests that are left.
`--resume` runs what has not passed.

`--device cpu`, without a GPU: the other tests of the same folders that are not slow, and the GPU
tests up to their first call of the device (outcome `skipped`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests/kernels", "tests/model", "tests/reshard")
SELECTED = {"cuda": "gpu", "cpu": "gpu or not (multirank or slow)"}
LIMIT_S = 60  # of a test
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
        known = [item for item in items if item.nodeid in self.rows.by_test]
        config.hook.pytest_deselected(items=known)
        items[:] = [item for item in items if item.nodeid not in self.rows.by_test]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            message = str(report.longrepr)[-2000:]
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
            row["message"] = str(report.longrepr)[-2000:]
        elif report.when == "call" and row["outcome"] == "started":
            row["outcome"] = "passed"
        self.rows.write()
        if report.failed and any(words in row["message"] for words in FATAL):
            pytest.exit(f"{report.nodeid}: the GPU needs a new process", returncode=3)


def run_pytest(file: Path, device: str, tests: list[str]) -> int:
    """Run the tests that have no row in `file`; return pytest's exit code."""
    arguments = [
        *("-q", "-p", "no:cacheprovider", "-m", SELECTED[device]),
        "--continue-on-collection-errors",
        *(f"--timeout={LIMIT_S}", "--timeout-method=thread"),
    ]
    return int(pytest.main([*arguments, *tests], plugins=[Recorder(Rows(file), device)]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("test", nargs="*", default=list(FOLDERS))
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=list(SELECTED), default="cuda")
    parser.add_argument("--quick", action="store_true", help="changes nothing here")
    parser.add_argument("--resume", action="store_true", help="run what has not passed")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        return run_pytest(arguments.json, arguments.device, arguments.test)
    if not arguments.resume:
        arguments.json.unlink(missing_ok=True)
    rows = Rows(arguments.json)
    rows.by_test = {t: row for t, row in rows.by_test.items() if row["outcome"] == "passed"}
    rows.write()
    return run_all(arguments.json, arguments.device, arguments.test)


def run_all(file: Path, device: str, tests: list[str]) -> int:
    """Start pytest until no test is left, or it ends without a new row; return the exit code."""
    command = [sys.executable, str(Path(__file__)), "--json", str(file), "--device", device]
    environment = os.environ | ({"HYBRIDENGINE_REHEARSAL": "1"} if device == "cpu" else {})
    while True:
        before = len(Rows(file).by_test)
        code = subprocess.run([*command, "--once", *tests], cwd=ROOT, env=environment).returncode
        rows = Rows(file)
        for row in rows.by_test.values():
            if row["outcome"] == "started":
                row["outcome"] = f"ended pytest with exit code {code}"
        rows.write()
        finished = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if finished or len(rows.by_test) == before:
            break
    bad = [r["test"] for r in rows.by_test.values() if r["outcome"] not in ("passed", "skipped")]
    print(f"gpu-tests: {len(rows.by_test)} tests, {len(bad)} failed", *bad, sep="\n  ")
    return int(bool(bad) or not (finished or code == pytest.ExitCode.NO_TESTS_COLLECTED))


if __name__ == "__main__":
    sys.exit(main())
