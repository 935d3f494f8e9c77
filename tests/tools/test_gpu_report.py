"""The parts of the GPU report without a GPU: rows are kept, resumed and limited in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tools import gpu_report, gpu_tests

# A part of two rows: resumes, and stalls or fails after its first row where `first` says so.
PART = """
import json, pathlib, sys, time
file = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
rows = json.loads(file.read_text())["rows"] if "--resume" in sys.argv else []
first = sys.argv[1]
if not rows:
    file.write_text(json.dumps({"rows": ["row 1"]}))
    if first == "stalls":
        time.sleep(60)
    if first == "fails":
        sys.exit(4)
file.write_text(json.dumps({"rows": [*rows, "row 2"]}))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(part, how it ends, resume, commit) → (its status, all sections of the results file)."""
    monkeypatch.setattr(gpu_report, "WORK", tmp_path)
    file = tmp_path / "results" / "device.json"

    def run(part: str, how: str, resume: bool = False, commit: str = "c0ffee"):
        results = gpu_report.Results(file, {"device": "a GPU", "commit": commit})
        status = gpu_report.run_part(
            *(part, [sys.executable, "-c", PART, how], results),
            resume=resume, environment=dict(os.environ), limit_s=10.0 if how == "stalls" else 120.0,
        )  # fmt: skip
        document = json.loads(file.read_text())
        assert document["device"] == "a GPU"
        return status, document["parts"]

    return run


def test_a_part_that_fails_or_stalls_keeps_its_rows_and_those_of_others(run):
    status, parts = run("kernels", "fails")
    assert status == parts["kernels"]["status"] == "exit code 4"
    assert parts["kernels"]["rows"] == ["row 1"]
    status, parts = run("step", "stalls")
    assert status == "not finished after 10 s" and parts["step"]["rows"] == ["row 1"]
    assert parts["step"]["sources_commit"] == "c0ffee" and parts["step"]["seconds"] >= 10
    status, parts = run("build", "passes")
    assert status == "passed" and list(parts) == ["build", "kernels", "step"], "in order of PARTS"
    assert parts["kernels"]["rows"] == ["row 1"]


def test_a_part_is_resumed_at_the_same_commit_only(run):
    run("kernels", "fails")
    status, parts = run("kernels", "fails", resume=True, commit="0ddba11")
    assert status == "exit code 4" and parts["kernels"]["rows"] == ["row 1"]
    status, parts = run("kernels", "fails", resume=True, commit="0ddba11")
    assert status == "passed" and parts["kernels"]["rows"] == ["row 1", "row 2"]
    assert run("kernels", "fails")[0] == "exit code 4", "without --resume it starts anew"


def test_every_part_has_a_command_that_is_there():
    root = gpu_report.ROOT
    assert tuple(gpu_report.PARTS) == ("build", "tests", "kernels", "step", "reshard")
    for script, *arguments in gpu_report.PARTS.values():
        assert (root / script).is_file() or script == "-m"
        for name in arguments[1:]:
            assert (root / "benchmarks" / f"{name}.py").is_file(), name


TESTS = """
import os, pytest
pytestmark = pytest.mark.gpu

def test_passes(): ...
def test_fails(): assert 1 == 2
def test_crashes(): os._exit(9)
@pytest.mark.skip(reason="not here")
def test_is_skipped(): ...
def test_leaves_a_bad_device(): raise RuntimeError("CUDA error: an illegal memory access")
def test_after_it(): ...
"""


def test_gpu_tests_go_on_after_a_crash_and_have_a_row_each(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import a_package_that_is_not_here")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    file = tmp_path / "rows.json"
    command = [sys.executable, gpu_tests.__file__, "--json", str(file), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {r["test"].split("::")[-1]: r for r in json.loads(file.read_text())["rows"]}
    assert "a_package_that" in rows.pop("test_other.py")["message"]
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_crashes": "ended pytest with exit code 9",
        "test_is_skipped": "skipped",
        "test_leaves_a_bad_device": "failed",
        "test_after_it": "passed",
    }
    assert "assert 1 == 2" in rows["test_fails"]["message"]
    (tmp_path / "test_some.py").write_text(TESTS.replace("1 == 2", "1 == 1"))
    subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=200)
    resumed = {r["test"].split("::")[-1]: r for r in json.loads(file.read_text())["rows"]}
    assert resumed["test_fails"]["outcome"] == "passed" and len(resumed) == len(rows) + 1
